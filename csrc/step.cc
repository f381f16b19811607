#include "step.h"

#include <algorithm>
#include <cstring>

#include "errors.h"
#include "store.h"

namespace tcxl {

namespace {

// Calls f with the array as its real type, once, outside any loop.
template <typename F>
auto with_integers(const void* p, bool is_int32, F f) {
  if (is_int32) return f(static_cast<const int32_t*>(p));
  return f(static_cast<const int64_t*>(p));
}

template <typename Offset>
void check_offsets(const Offset* offsets, const GroupInput& in, const Group& group) {
  const auto features = static_cast<int64_t>(group.features.size());
  if (in.num_offsets != features * in.bags + 1) {
    fail(ErrorKind::kValue, "offsets have ", in.num_offsets, " entries, ", features,
         " features with ", in.bags, " bags need ", features * in.bags + 1);
  }
  if (offsets[0] != 0) fail(ErrorKind::kValue, "offsets must begin with 0, got ", offsets[0]);
  bool decreases = false;  // no branch in the loop: it vectorizes
  for (int64_t i = 1; i < in.num_offsets; ++i) decreases |= offsets[i] < offsets[i - 1];
  for (int64_t i = 1; decreases && i < in.num_offsets; ++i) {
    if (offsets[i] >= offsets[i - 1]) continue;
    const int64_t bags = std::max<int64_t>(in.bags, 1);
    fail(ErrorKind::kValue, "offsets must not decrease: entry ", i, " is ", offsets[i], " after ",
         offsets[i - 1], "\n  where: feature '",
         group.features[static_cast<size_t>((i - 1) / bags)].name, "', bag ", (i - 1) % bags);
  }
  if (static_cast<int64_t>(offsets[in.num_offsets - 1]) != in.num_values) {
    fail(ErrorKind::kValue, "the last offset is ", offsets[in.num_offsets - 1], ", there are ",
         in.num_values, " values");
  }
}

[[noreturn]] void fail_index(const GroupFeature& feature, const Table& table, int64_t value,
                             int64_t position, const int64_t* offsets, int64_t bags) {
  const int64_t bag = std::upper_bound(offsets, offsets + bags + 1, position) - offsets - 1;
  fail(ErrorKind::kIndex, "feature '", feature.name, "' has index ", value, " in sample ", bag,
       " (lookup ", position - offsets[bag], " of its bag, position ", position,
       " of the values); table '", table.name, "' has rows [0, ", table.view.rows,
       ")\n  state: the pool is unchanged\n  do:    ",
       value < 0 ? text("keep ids at 0 or above") : text("raise num_embeddings above ", value),
       ", or hash the feature into the table's range");
}

template <typename Value>
bool any_out_of_range(const Value* values, int64_t n, uint64_t rows) {
  bool bad = false;
  for (int64_t i = 0; i < n; ++i)
    bad |= static_cast<uint64_t>(static_cast<int64_t>(values[i])) >= rows;
  return bad;
}

}  // namespace

void GroupBatch::assign(const GroupInput& in, const Group& spec, const std::vector<Table>& tables) {
  if (in.bags < 0) fail(ErrorKind::kValue, "the number of bags is ", in.bags);
  with_integers(in.offsets, in.offsets_are_int32,
                [&](const auto* p) { check_offsets(p, in, spec); });
  group = in.group;
  bags = in.bags;
  offsets.resize(static_cast<size_t>(in.num_offsets));
  with_integers(in.offsets, in.offsets_are_int32,
                [&](const auto* p) { std::copy(p, p + in.num_offsets, offsets.begin()); });
  ids.resize(static_cast<size_t>(in.num_values));
  with_integers(in.values, in.values_are_int32,
                [&](const auto* p) { std::copy(p, p + in.num_values, ids.begin()); });
  has_weights = in.weights != nullptr;
  weights.assign(in.weights, in.weights + (has_weights ? in.num_values : 0));

  is_filtered = false;
  for (size_t f = 0; f < spec.features.size(); ++f) {
    const GroupFeature& feature = spec.features[f];
    const Table& table = tables[feature.table];
    const int64_t* feature_offsets = offsets.data() + static_cast<int64_t>(f) * bags;
    const int64_t begin = feature_offsets[0], end = feature_offsets[bags];
    is_filtered |= feature.padding_row >= 0;
    if (!any_out_of_range(ids.data() + begin, end - begin, table.view.rows)) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (static_cast<uint64_t>(ids[static_cast<size_t>(i)]) >= table.view.rows)
        fail_index(feature, table, ids[static_cast<size_t>(i)], i, feature_offsets, bags);
    }
  }
  if (is_filtered) {
    given_ids = ids;
    given_offsets = offsets;
    given_weights = weights;
    size_t kept = 0;
    for (size_t f = 0; f < spec.features.size(); ++f) {
      for (int64_t b = 0; b < bags; ++b) {
        const size_t bag = f * static_cast<size_t>(bags) + static_cast<size_t>(b);
        const auto begin = static_cast<size_t>(offsets[bag]),
                   end = static_cast<size_t>(offsets[bag + 1]);
        offsets[bag] = static_cast<int64_t>(
            kept);  // read before it is overwritten: entry bag + 1 is still the old one
        for (size_t i = begin; i < end; ++i) {
          if (ids[i] == spec.features[f].padding_row) continue;
          ids[kept] = ids[i];
          if (has_weights) weights[kept] = weights[i];
          ++kept;
        }
      }
    }
    offsets.back() = static_cast<int64_t>(kept);
    ids.resize(kept);
    if (has_weights) weights.resize(kept);
  }
  features.resize(spec.features.size());
  for (size_t f = 0; f < spec.features.size(); ++f) {
    features[f] = {ids.data(), offsets.data() + static_cast<int64_t>(f) * bags,
                   has_weights ? weights.data() : nullptr, spec.features[f].pooling,
                   spec.features[f].column};
  }
}

void GroupBatch::spread(const Group& spec, const std::vector<float>& kept, float* result) const {
  size_t next = 0;
  for (size_t f = 0; f < spec.features.size(); ++f) {
    const int64_t* feature_offsets = given_offsets.data() + static_cast<int64_t>(f) * bags;
    for (int64_t i = feature_offsets[0]; i < feature_offsets[bags]; ++i) {
      const bool is_padding = given_ids[static_cast<size_t>(i)] == spec.features[f].padding_row;
      result[i] = is_padding ? 0.0f : kept[next++];
    }
  }
}

bool GroupBatch::equals(const GroupInput& in, const Group& spec) const {
  const auto& my_ids = is_filtered ? given_ids : ids;
  const auto& my_offsets = is_filtered ? given_offsets : offsets;
  const auto& my_weights = is_filtered ? given_weights : weights;
  if (in.group != group || in.bags != bags || features.size() != spec.features.size()) return false;
  if (static_cast<size_t>(in.num_values) != my_ids.size()) return false;
  if (static_cast<size_t>(in.num_offsets) != my_offsets.size()) return false;
  if ((in.weights != nullptr) != has_weights) return false;
  auto same = [](const void* p, bool is_int32, const std::vector<int64_t>& mine) {
    if (is_int32) return std::equal(mine.begin(), mine.end(), static_cast<const int32_t*>(p));
    return mine.empty() || std::memcmp(p, mine.data(), mine.size() * sizeof(int64_t)) == 0;
  };
  const size_t weight_bytes = my_weights.size() * sizeof(float);
  return same(in.values, in.values_are_int32, my_ids) &&
         same(in.offsets, in.offsets_are_int32, my_offsets) &&
         (weight_bytes == 0 || std::memcmp(in.weights, my_weights.data(), weight_bytes) == 0);
}

uint64_t Step::num_rows() const {
  uint64_t rows = 0;
  for (size_t t = 0; t < num_tables; ++t) rows += tables[t].lookups.num_rows();
  return rows;
}

uint64_t Step::num_lookups() const {
  uint64_t lookups = 0;
  for (const GroupBatch& part : groups) lookups += part.ids.size();
  return lookups;
}

}  // namespace tcxl
