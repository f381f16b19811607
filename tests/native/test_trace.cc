// The profile's trace: spans, the rows it counts, the sampled times of an update.
#include <thread>

#include "check.h"
#include "kernels_reference.h"
#include "row_history.h"
#include "trace.h"

namespace {

using namespace tcxl;

void is_silent_when_off() {
  Trace trace;
  {
    const Traced traced(trace, Phase::kLookup, 1);
  }
  CHECK(trace.take().spans.empty());
  trace.start(8);
  trace.stop();
  {
    const Traced traced(trace, Phase::kLookup, 1);
  }
  CHECK(trace.take().spans.empty());
}

void keeps_spans_of_every_thread_in_order() {
  Trace trace;
  trace.start(8);
  const uint64_t before = Trace::now();
  {
    const Traced outer(trace, Phase::kCommit, 7);
    const Traced inner(trace, Phase::kUpdate, 7);
  }
  std::thread([&] {
    Trace::name_thread(Track::kLogWriter);
    const Traced traced(trace, Phase::kUndoLog, 8);
  }).join();
  const uint64_t after = Trace::now();
  const Trace::Taken taken = trace.take();
  if (!CHECK_EQUAL(taken.spans.size(), 3u)) return;
  const TraceSpan &update = taken.spans[0], &commit = taken.spans[1], &log = taken.spans[2];
  CHECK(update.phase == Phase::kUpdate && commit.phase == Phase::kCommit);
  CHECK(commit.begin_ns <= update.begin_ns && update.end_ns <= commit.end_ns);
  CHECK(commit.track == Track::kTrainer && log.track == Track::kLogWriter);
  CHECK_EQUAL(log.batch, 8u);
  for (const TraceSpan& span : taken.spans)
    CHECK(before <= span.begin_ns && span.begin_ns <= span.end_ns && span.end_ns <= after);
  CHECK(trace.take().spans.empty());
}

void counts_what_nobody_took() {
  Trace trace;
  trace.start(2);
  for (int i = 0; i < 5; ++i) const Traced traced(trace, Phase::kLookup, 1);
  const Trace::Taken taken = trace.take();
  CHECK_EQUAL(taken.spans.size(), 2u);
  CHECK_EQUAL(taken.dropped, 3u);
  {
    const Traced traced(trace, Phase::kLookup, 2);
  }
  CHECK_EQUAL(trace.take().spans.size(), 1u);
}

void names_are_distinct() {
  std::map<std::string, int> seen;
  for (auto p = Phase::kAnnounce; p <= Phase::kTableSync; p = Phase(uint32_t(p) + 1))
    ++seen[phase_name(p)];
  for (const auto& [name, count] : seen) CHECK_CASE(count == 1 && name != "unknown", name);
}

// A step over two tables with one lookup a bag.
struct TwoTables {
  std::vector<tcxl::Table> tables{2};
  Step step;
  std::vector<int64_t> offsets;

  TwoTables() {
    for (tcxl::Table& table : tables) table.view.rows = 100, table.view.dim = 4;
    tables[1].view.optimizer = OptimizerKind::kRowWiseAdagrad;
  }
  BatchCounts count(RowHistory& history, std::vector<std::vector<int64_t>> ids) {
    step.num_tables = 0;
    step.place.assign(2, kNoRecord);
    step.tables.resize(2);
    for (size_t t = 0; t < ids.size(); ++t) {
      if (ids[t].empty()) continue;
      step.place[t] = static_cast<uint32_t>(step.num_tables);
      StepTable& table = step.tables[step.num_tables++];
      offsets.clear();
      for (size_t b = 0; b <= ids[t].size(); ++b) offsets.push_back(static_cast<int64_t>(b));
      const FeatureBags bags{ids[t].data(), offsets.data(), nullptr, Pooling::kSum, 0};
      table.lookups.build(&bags, 1, static_cast<int64_t>(ids[t].size()), 4, 100);
    }
    BatchCounts counts;
    history.count(step, tables, counts);
    return counts;
  }
};

void counts_rows_that_recur_and_rows_that_are_new() {
  TwoTables batches;
  RowHistory history;
  const BatchCounts first = batches.count(history, {{5, 5, 9}, {1}});
  CHECK_EQUAL(first.lookups, 4u);
  CHECK_EQUAL(first.rows, 3u);
  CHECK_EQUAL(first.lookup_bytes, 4u * 16);
  CHECK_EQUAL(first.row_bytes, 3u * 16 + 4);  // one table has a word of state a row
  CHECK_EQUAL(first.first_rows, 3u);
  CHECK_EQUAL(first.recurring_rows, 0u);
  const BatchCounts second = batches.count(history, {{5, 5, 5, 7}, {}});
  CHECK_EQUAL(second.recurring_rows, 1u);
  CHECK_EQUAL(second.recurring_lookups, 3u);
  CHECK_EQUAL(second.first_rows, 1u);
  // Row 9 and table 1 were there two batches ago: neither new nor recurring.
  const BatchCounts third = batches.count(history, {{9}, {1, 2}});
  CHECK_EQUAL(third.recurring_rows, 0u);
  CHECK_EQUAL(third.first_rows, 1u);
}

uint64_t ticks = 0;
uint64_t count_up() { return ticks += 10; }

// Sampling changes no bit; the parts are within the whole.
void update_is_sampled_without_changing_a_bit() {
  using test::Random;
  std::vector<int64_t> ids, offsets{0};
  Random random{5};
  for (int64_t b = 0; b < 700; ++b) {
    ids.push_back(random.below(600));
    offsets.push_back(b + 1);
  }
  const FeatureBags bags{ids.data(), offsets.data(), nullptr, Pooling::kSum, 0};
  std::vector<float> grad(700 * 16);
  for (float& g : grad) g = random.uniform();
  TableLookups lookups;
  lookups.build(&bags, 1, 700, 16, 600);
  std::vector<std::vector<float>> weights;
  UpdateTimes times;
  for (const bool is_timed : {false, true}) {
    Random same{9};
    test::Table table(600, 16, OptimizerKind::kRowWiseAdagrad, same);
    UpdateJob job;
    job.table = table.view;
    job.lookups = &lookups;
    job.grad = grad.data();
    job.learning_rate = 0.1f;
    if (is_timed) job.times = &times, job.clock = &count_up;
    update_rows(job, 0, lookups.num_rows());
    weights.emplace_back(table.weight.data(), table.weight.data() + table.weight.size());
  }
  CHECK(weights[0] == weights[1]);
  CHECK(times.reduce_ns > 0);
  CHECK(times.log_ns + times.reduce_ns < times.all_ns);
  CHECK_EQUAL(times.reduce_ns % 10, 0u);
}

}  // namespace

int main() {
  is_silent_when_off();
  keeps_spans_of_every_thread_in_order();
  counts_what_nobody_took();
  names_are_distinct();
  counts_rows_that_recur_and_rows_that_are_new();
  update_is_sampled_without_changing_a_bit();
  return tcxl::test::check_result();
}
