// Dense log (paper: "relaxed batch-aware checkpoint"): the dense part of the model, and everything
// else that resume needs, captured after one batch and written by the background thread in slices.
// Two areas alternate; the area of the newest complete generation is never the one being written.
#pragma once

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

class DenseLog {
 public:
  explicit DenseLog(Store& store) : store_(store) {}

  // Newest valid generation m <= committed that belongs to the slot's life or is named by the slot.
  std::optional<Generation> newest_valid(const layout::Slot& slot) const;
  std::string read_resume(const Generation& generation) const;
  const std::byte* blob(const Generation& generation) const;
  // What damage `verify` finds: the reason why an area is not a valid generation; empty if it is
  // one.
  std::string check_area(uint32_t area, Generation& out) const;

  // Highest life of any complete generation, be it the slot's or not; 0: there is none.
  uint64_t newest_life() const;

  const std::optional<Generation>& newest() const { return newest_; }
  void set_newest(const Generation& generation) { newest_ = generation; }

  struct Part {
    const void* data;
    uint64_t bytes;
  };
  // Copies all parts to the staging buffer; grows the older area (geometry seq + 1) when they need
  // more room.
  void capture(uint64_t batch, uint64_t life, const std::string& resume,
               const std::vector<Part>& parts);
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
  Store& store_;
  std::optional<Generation> newest_;
  Generation staged_;
  std::string staged_resume_;
  std::byte* staged_area_ = nullptr;
  std::unique_ptr<std::byte[]> staging_;
  uint64_t staging_bytes_ = 0, written_ = 0;
  uint32_t crc_ = 0;
  bool is_writing_ = false, is_body_written_ = false;
};

}  // namespace tcxl
