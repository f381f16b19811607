#include "geometry.h"

#include <algorithm>
#include <utility>

#include "errors.h"
#include "kernels.h"

namespace tcxl {

using namespace layout;

namespace {

constexpr uint64_t kBytesMax =
    1ull << 56;  // of a span, so that sums of offsets and sizes never overflow

bool is_inside(uint64_t offset, uint64_t bytes, uint64_t end) {
  return offset <= end && bytes <= end - offset;
}

struct Range {
  uint64_t offset, bytes;
};

bool has_overlap(std::vector<Range> ranges) {
  std::erase_if(ranges, [](const Range& r) { return r.bytes == 0; });
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].offset - ranges[i - 1].offset < ranges[i - 1].bytes) return true;
  }
  return false;
}

}  // namespace

std::string geometry_fault(const GeometryHeader& g) {
  if (g.seq > kCountMax) return text("its number is ", g.seq);
  if (g.log_bytes < kHeadBytes || g.log_bytes > kBytesMax)
    return text("the log has ", g.log_bytes, " bytes");
  if (g.data_bytes > kBytesMax) return text("the tables have ", g.data_bytes, " bytes");
  auto region_fault = [&](const char* name, uint64_t offset, uint64_t bytes, uint64_t align) {
    if (bytes == 0) return std::string();
    if (offset % align != 0 || bytes % align != 0) return text(name, " is not aligned");
    if (offset < kHeadBytes || !is_inside(offset, bytes, g.log_bytes))
      return text(name, " is outside the log");
    return std::string();
  };
  std::string fault = region_fault("the undo ring", g.ring_offset, g.ring_bytes, kRegionAlign);
  std::vector<Range> regions = {{g.ring_offset, g.ring_bytes}};
  for (uint32_t area = 0; area < kDenseAreas && fault.empty(); ++area) {
    fault = region_fault("a dense area", g.dense_offset[area], g.dense_bytes[area], kPage);
    regions.push_back({g.dense_offset[area], g.dense_bytes[area]});
  }
  if (fault.empty() && has_overlap(regions)) fault = "undo ring and dense areas overlap";
  if (fault.empty() && g.frame_bytes_max > g.ring_bytes)
    fault = "frames are larger than the undo ring";
  return fault;
}

uint64_t state_floats(const TableRecord& r) {
  const auto kind = static_cast<OptimizerKind>(r.optimizer);
  return static_cast<uint64_t>(state_dim(kind, r.dim)) + r.has_check;
}

std::string table_fault(const TableRecord& r, uint64_t data_bytes) {
  if (r.optimizer > static_cast<uint32_t>(OptimizerKind::kRowWiseAdagrad))
    return text("optimizer number ", r.optimizer, " is unknown");
  if (r.dim == 0 || r.rows == 0 || r.rows > kBytesMax / sizeof(float) / r.dim)
    return text(r.rows, " rows of dimension ", r.dim);
  if (r.has_check > 1) return text("it has checksums of kind ", r.has_check, ", which is unknown");
  if (r.weight_bytes != r.rows * r.dim * sizeof(float) ||
      r.state_bytes != r.rows * state_floats(r) * sizeof(float))
    return "sizes do not fit the shape";
  if (r.weight_offset % kRegionAlign != 0 || r.state_offset % kRegionAlign != 0)
    return "columns are not aligned";
  if (!is_inside(r.weight_offset, r.weight_bytes, data_bytes) ||
      !is_inside(r.state_offset, r.state_bytes, data_bytes))
    return "columns are outside the data";
  return "";
}

std::string overlap_fault(std::span<const TableRecord> records) {
  std::vector<Range> columns;
  columns.reserve(2 * records.size());
  for (const TableRecord& r : records) {
    columns.push_back({r.weight_offset, r.weight_bytes});
    columns.push_back({r.state_offset, r.state_bytes});
  }
  return has_overlap(std::move(columns)) ? "columns of its tables overlap" : "";
}

}  // namespace tcxl
