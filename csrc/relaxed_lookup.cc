#include "relaxed_lookup.h"

#include <algorithm>

namespace tcxl {

using layout::FrameSegment;

void PreviousRows::take(uint64_t batch, uint64_t offset, std::span<const FrameSegment> segments) {
  is_known_ = true;
  batch_ = batch;
  offset_ = offset;
  segments_.assign(segments.begin(), segments.end());
  place_.assign(store_.tables().size(), kNoRecord);
  for (size_t s = 0; s < segments_.size(); ++s)
    place_[segments_[s].table] = static_cast<uint32_t>(s);
}

void PreviousRows::take(const Step& step) {
  take(step.batch, step.frame_offset, step.plan.segments);
}

void PreviousRows::take(const layout::Descriptor& d, std::span<const FrameSegment> segments) {
  take(d.batch, d.offset, segments);
}

const FrameSegment* PreviousRows::find(size_t table) const {
  return table < place_.size() && place_[table] != kNoRecord ? &segments_[place_[table]] : nullptr;
}

const uint64_t* PreviousRows::rows(const FrameSegment& segment) const {
  return store_.log().at<uint64_t>(offset_ + segment.row_offset);
}

const float* PreviousRows::weights(const FrameSegment& segment) const {
  return store_.log().at<float>(offset_ + segment.weight_offset);
}

uint64_t PreviousRows::correct(size_t table, const TableLookups& lookups, float* out) const {
  const FrameSegment* segment = find(table);
  if (segment == nullptr) return 0;
  CorrectJob job;
  job.table = store_.tables()[table].view;
  job.lookups = &lookups;
  job.changed_rows = rows(*segment);
  job.num_changed = segment->count;
  job.before = weights(*segment);
  job.out = out;
  return correct_lookups(job);
}

// A table of the distinct rows alone, and the lookups in it: the same kernel on the same values
// gives the same bits.
void PreviousRows::pool_before(size_t table, const TableLookups& lookups,
                               const std::vector<FeatureBags>& features, int64_t bags, float* out,
                               int64_t stride) const {
  TableView view = store_.tables()[table].view;
  const auto dim = static_cast<size_t>(view.dim);
  const FrameSegment* segment = find(table);
  const uint64_t* changed = segment != nullptr ? rows(*segment) : nullptr;
  const uint64_t* changed_end = segment != nullptr ? changed + segment->count : nullptr;
  std::vector<float> compact(lookups.num_rows() * dim);
  for (size_t r = 0; r < lookups.num_rows(); ++r) {
    const uint64_t row = lookups.rows[r];
    const uint64_t* at = std::lower_bound(changed, changed_end, row);
    const bool is_changed = at != changed_end && *at == row;
    const float* from = is_changed ? weights(*segment) + static_cast<size_t>(at - changed) * dim
                                   : view.weight + row * dim;
    std::copy_n(from, dim, compact.data() + r * dim);
  }
  view.weight = compact.data();
  view.rows = lookups.num_rows();
  std::vector<int64_t> ids, offsets(static_cast<size_t>(bags) + 1);
  for (FeatureBags feature : features) {
    ids.clear();
    const int64_t begin = feature.offsets[0], end = feature.offsets[bags];
    for (int64_t i = begin; i < end; ++i) {
      const auto row = static_cast<uint64_t>(feature.ids[i]);
      const auto at = std::lower_bound(lookups.rows.begin(), lookups.rows.end(), row);
      ids.push_back(at - lookups.rows.begin());
    }
    for (size_t b = 0; b < offsets.size(); ++b) offsets[b] = feature.offsets[b] - begin;
    feature.ids = ids.data();
    feature.offsets = offsets.data();
    if (feature.weights != nullptr) feature.weights += begin;
    lookup(view, feature, 0, bags, out, stride);
  }
}

}  // namespace tcxl
