// Frames that are not needed any more and are kept for a rewind as long as nobody wants their
// space.
#include <algorithm>

#include "errors.h"
#include "undo_log.h"

namespace tcxl {

using namespace layout;

// Takes the frame before those kept so far, if its place is one where it can still be whole.
bool UndoLog::keep(const Descriptor& d) {
  // In an outgrown ring, where nothing is written any more.
  if (d.offset < ring_offset_ || d.offset >= ring_offset_ + ring_bytes_) return true;
  const uint64_t begin = d.offset - ring_offset_, end = begin + std::max(d.bytes, kLine);
  if (end > ring_bytes_) return false;
  if (!kept_.empty()) {
    const Live &next = kept_.front(), &newest = kept_.back();
    if (next.batch != d.batch + 1) return false;  // those between are in an outgrown ring
    const bool has_wrapped = next.begin > newest.begin;
    const bool is_before = end <= next.begin, is_after = begin >= newest.end;
    if (has_wrapped ? !(is_before && is_after) : !(is_before || is_after)) return false;
  }
  kept_.push_front({d.batch, begin, end});
  return true;
}

void UndoLog::adopt(uint64_t batch, uint64_t life) {
  kept_.clear();
  oldest_ = batch;
  for (uint64_t n = batch; n > 0 && batch - n + 1 < kDirectoryEntries; --n) {
    const auto d = find_on_line(n, life);
    if (!d || !keep(*d)) return;
    life = d->life;
    oldest_ = n - 1;
  }
}

void UndoLog::hold(uint64_t batch) {
  if (kept_.empty() || kept_.back().batch != batch) return;  // in an outgrown ring: it stays
  live_.push_front(kept_.back());
  kept_.pop_back();
}

std::optional<Descriptor> UndoLog::find_on_line(uint64_t batch, uint64_t life) const {
  const Descriptor d = *descriptor(batch);
  return d.life <= life ? find(batch, d.life) : std::nullopt;
}

bool UndoLog::is_sound(const Descriptor& d, bool is_committed) const {
  try {
    check(d, is_committed);
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace tcxl
