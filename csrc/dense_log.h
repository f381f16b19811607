// Dense log (paper: "relaxed batch-aware checkpoint"): the dense part of the model, and everything
// else that resume needs, captured after one batch and written by the background thread in slices.
// The area of the newest complete generation is never the one being written; of the others the one
// that a rewind misses least (dense_areas.cc).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layout.h"
#include "store.h"

namespace tcxl {

struct Generation {
  uint32_t area = 0;
  layout::DenseHeader header{};
};

// Says in a slot which generation it vouches for.
void name_generation(layout::Slot& slot, const Generation& generation);

// Which generations to keep beyond the last two.
struct Horizon {
  static constexpr uint64_t kAuto = ~0ull;  // as many as a tenth of the undo log has room for
  uint64_t keep = 0;
  uint64_t ring_bytes = 0;  // of the undo log; 0: it has none yet
  uint64_t oldest = 0;      // batch that its frames reach back to
};

class DenseLog {
 public:
  explicit DenseLog(Store& store) : store_(store) {}

  // Newest valid generation m <= committed that belongs to the slot's life or is named by the slot.
  // Of two generations of one batch: the one that the slot names, or the later one where the slot
  // may be an older one (a journal's base).
  std::optional<Generation> newest_valid(const layout::Slot& slot,
                                         bool is_slot_newest = true) const;
  std::string read_resume(const Generation& generation) const;
  const std::byte* blob(const Generation& generation) const;
  // What damage `verify` finds: the reason why an area is not a valid generation; empty if it is
  // one.
  std::string check_area(uint32_t area, Generation& out) const;
  // The same of the header alone.
  std::string check_header(uint32_t area, Generation& out) const;

  // Highest life of any complete generation, be it the slot's or not; 0: there is none.
  uint64_t newest_life() const;

  const std::optional<Generation>& newest() const { return newest_; }
  // Takes over what generations there are.
  void set_newest(const Generation& generation);
  void forget(uint32_t area);  // its generation is of no use: the next one may go there

  struct Part {
    const void* data;
    uint64_t bytes;
  };
  // Copies all parts to the staging buffer; makes areas (geometry seq + 1) when there are too few
  // that have room.
  void capture(uint64_t batch, uint64_t life, const std::string& resume,
               const std::vector<Part>& parts, const Horizon& horizon = {});
  bool is_writing() const { return is_writing_; }
  bool is_body_written() const { return is_body_written_; }
  uint64_t writing_batch() const { return staged_.header.batch; }
  // Writes the next slice of the body; true when all of it is written, and durable. Touches nothing
  // that readers look at.
  bool write_slice();
  // Writes the header (P): the generation is complete on the medium.
  void complete();
  // Makes it the newest for those who ask.
  void publish();
  // A copy of an existing generation under another batch and life (resume="latest").
  void rewrite(const Generation& from, uint64_t batch, uint64_t life, const std::string& resume);

 private:
  struct Space {
    uint64_t offset, bytes;
  };
  bool is_target(uint32_t area, uint64_t bytes) const;
  Space slack() const;
  uint64_t extra_areas(const Horizon& horizon, uint64_t area_bytes, uint64_t wanted) const;
  uint64_t place(layout::GeometryHeader& g, Space space, uint64_t count, uint64_t area_bytes);
  void ensure_areas(uint64_t bytes, const Horizon& horizon);
  uint32_t choose_area(uint64_t batch, uint64_t bytes, const Horizon& horizon) const;

  Store& store_;
  std::optional<Generation> newest_;
  // Headers of the generations that are there, as far as known; of an area being written: none.
  std::array<std::optional<layout::DenseHeader>, layout::kDenseAreas> held_;
  bool is_full_ = false;  // the medium had no room for more areas
  Generation staged_;
  std::string staged_resume_;
  std::byte* staged_area_ = nullptr;
  std::unique_ptr<std::byte[]> staging_;
  uint64_t staging_bytes_ = 0, written_ = 0;
  uint32_t crc_ = 0;
  bool is_writing_ = false, is_body_written_ = false;
};

}  // namespace tcxl
