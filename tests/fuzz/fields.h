// The structures of a pool by name, so that an input can say "the bytes of frame 2".
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tcxl::fuzz {

enum class Structure : uint8_t {
  kSuperblock,  // 0: copy A, 1: copy B
  kSession,
  kSlot,            // 0: the newest, 1: the older one
  kGeometry,        // as slots
  kTable,           // records of the newest geometry
  kDescriptor,      // of batches 1, 2, ...
  kFrame,           // of batches 1, 2, ...
  kSegment,         // of all undo frames, in order
  kRow,             // first row number of each of these segments
  kTag,             // first tag of each of these segments
  kDense,           // areas
  kJournalSlot,     // as slots
  kJournalFrame,    // in the order of the ring
  kJournalSegment,  // of all journal frames, in order
  kJournalRow,      // first row number of each of these segments
};
inline constexpr size_t kNumStructures = 15;

struct Field {
  Structure structure;
  std::string_view owner, name;  // "frame", "bytes"
  uint16_t offset;
  uint8_t bytes;
};

std::span<const Field> fields();

}  // namespace tcxl::fuzz
