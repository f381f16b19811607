// Relaxed lookup in the engine: when batches are pooled early, and when that must have ended.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine.h"
#include "errors.h"
#include "stopwatch.h"

namespace tcxl {

namespace {

constexpr int64_t kBagsPerChunk = 256;
constexpr uint64_t kWorthSharing = 4096;  // lookups; below, waking threads costs more

}  // namespace

// --- pooling of a group, block after block

// Feature-major order: one table after the other has the better TLB reach.
uint64_t Engine::num_blocks(const GroupBatch& batch) const {
  const auto blocks = static_cast<uint64_t>((batch.bags + kBagsPerChunk - 1) / kBagsPerChunk);
  return blocks * groups_[batch.group].features.size();
}

void Engine::pool_block(const GroupBatch& batch, uint64_t block, float* out) const {
  const Group& spec = groups_[batch.group];
  const auto blocks = static_cast<uint64_t>((batch.bags + kBagsPerChunk - 1) / kBagsPerChunk);
  const size_t f = block / blocks;
  const int64_t begin = static_cast<int64_t>(block % blocks) * kBagsPerChunk;
  tcxl::lookup(store_.tables()[spec.features[f].table].view, batch.features[f], begin,
               std::min(batch.bags, begin + kBagsPerChunk), out, spec.stride);
}

// --- early

// With the engine's mutex held: the step's bags are to be pooled from the present rows.
void Engine::begin_early(Step& step) {
  EarlyLookup& early = step.early;
  early.base = committed_;
  early.pooled.resize(std::max(early.pooled.size(), step.groups.size()));
  early.first_block.assign(1, 0);
  for (size_t g = 0; g < step.groups.size(); ++g) {
    const GroupBatch& batch = step.groups[g];
    early.pooled[g].resize(static_cast<size_t>(batch.bags * groups_[batch.group].stride));
    early.first_block.push_back(early.first_block.back() + num_blocks(batch));
  }
  early.next_block = 0;
}

// Any number of threads may do this at once.
void Engine::take_early_blocks(Step& step) {
  EarlyLookup& early = step.early;
  const uint64_t end = early.first_block.back();
  size_t g = 0;
  for (uint64_t i = early.next_block++; i < end; i = early.next_block++) {
    while (i >= early.first_block[g + 1]) ++g;
    pool_block(step.groups[g], i - early.first_block[g], early.pooled[g].data());
  }
}

// The step after the one in flight, while no row changes.
bool Engine::background_early(Lock& lock) {
  if (!options_.is_relaxed || is_updating_ || queue_.size() < 2) return false;
  const std::shared_ptr<Step> step = queue_[1];
  if (step->id == 0) return false;
  if (step->early.base == committed_) return false;  // begun before: the commit takes the rest
  begin_early(*step);
  early_ = step;
  Traced traced(trace(), Phase::kEarlyLookup, committed_ + 2);
  lock.unlock();
  const Stopwatch watch;
  take_early_blocks(*step);
  const uint64_t ns = watch.ns();
  traced.end();
  lock.lock();
  early_.reset();
  stats_.background_early_ns += ns;
  changed_.notify_all();
  return true;
}

// Early lookups that nobody will ask for.
void Engine::cancel_early(Lock& lock, const Step* wanted) {
  if (early_ && early_.get() != wanted) {
    early_->early.next_block = early_->early.first_block.back();
    early_->early.base = EarlyLookup::kNone;
  }
  changed_.wait(lock, [&] { return !early_ || early_.get() == wanted || has_stopped(); });
  check_background();
}

// Before the first store of an update: what is left of the early lookup of the step behind it.
void Engine::finish_early(Lock& lock) {
  if (!options_.is_relaxed) return;
  const Stopwatch watch;
  const Traced traced(trace(), Phase::kEarlyWait, committed_ + 2);
  const std::shared_ptr<Step> step = queue_.size() > 1 && queue_[1]->id != 0 ? queue_[1] : nullptr;
  cancel_early(lock, step.get());
  if (step) {
    if (step->early.base != committed_) begin_early(*step);
    lock.unlock();
    workers_.run(
        static_cast<uint64_t>(workers_.num_threads()), [&](uint64_t) { take_early_blocks(*step); },
        step->num_lookups() >= kWorthSharing);
    lock.lock();
    changed_.wait(lock, [&] { return !early_ || has_stopped(); });
    check_background();
  }
  stats_.early_wait_ns += watch.ns();
}

// --- corrected

// The rows that the committed batch changed, found in the undo log; false: it no longer has them.
bool Engine::recall_previous() {
  Lock lock(mutex_);
  previous_.forget();
  if (committed_ == 0) return true;  // nothing came before the first batch
  const auto frame = undo_.find_on_line(committed_, life_);
  if (!frame || !undo_.is_sound(*frame, true)) return false;
  previous_.take(*frame, undo_.segments(*frame));
  undo_.hold(committed_);
  return true;
}

void Engine::look_up_relaxed(const Lookup& lookup, float* out) {
  const GroupBatch& batch = lookup.batch();
  Step* step = lookup.step.get();
  bool is_early = false;
  {
    Lock lock(mutex_);
    is_early = step != nullptr && step->early.base != EarlyLookup::kNone &&
               step->early.base + 1 == committed_;
    if (is_early) ensure_sorted(lock, *step);
  }
  if (!is_early) {
    pool_late(batch, out);
    return;
  }
  const Traced traced(trace(), Phase::kCorrect, committed_ + 1);
  const float* pooled = step->early.pooled[lookup.index].data();
  const int64_t stride = groups_[batch.group].stride;
  std::atomic<uint64_t> corrected{0};
  workers_.run(
      step->num_tables,
      [&](uint64_t t) {
        const StepTable& table = step->tables[t];
        if (table.group != lookup.index) return;
        const auto dim = static_cast<size_t>(store_.tables()[table.table].view.dim);
        for (const FeatureBags& feature : table.features) {
          for (int64_t at = feature.column; at < batch.bags * stride; at += stride)
            std::memcpy(out + at, pooled + at, dim * sizeof(float));
        }
        corrected += previous_.correct(table.table, table.lookups, out);
      },
      batch.ids.size() >= kWorthSharing);
  stats_.corrected_lookups += corrected;
}

// The same formula for a batch that nobody announced in time.
void Engine::pool_late(const GroupBatch& batch, float* out) {
  const Group& spec = groups_[batch.group];
  std::vector<std::vector<FeatureBags>> by_table(store_.tables().size());
  for (size_t f = 0; f < spec.features.size(); ++f)
    by_table[spec.features[f].table].push_back(batch.features[f]);
  std::atomic<uint64_t> corrected{0};
  workers_.run(by_table.size(), [&](uint64_t table) {
    const std::vector<FeatureBags>& features = by_table[table];
    if (features.empty()) return;
    TableLookups lookups;
    lookups.build(features.data(), features.size(), batch.bags, spec.stride,
                  store_.tables()[table].view.rows);
    previous_.pool_before(table, lookups, features, batch.bags, out, spec.stride);
    corrected += previous_.correct(table, lookups, out);
  });
  stats_.corrected_lookups += corrected;
  ++stats_.late_lookups;
}

}  // namespace tcxl
