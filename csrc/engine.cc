#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "errors.h"
#include "stopwatch.h"

namespace tcxl {

namespace {

constexpr uint64_t kWorthSharing = 4096;  // lookups; below, waking threads costs more

}  // namespace

Engine::Engine(Store& store, UndoLog& undo, DenseLog& dense, Journal* journal, uint64_t committed,
               const EngineOptions& options)
    : store_(store),
      undo_(undo),
      dense_(dense),
      journal_(journal),
      options_(options),
      workers_(std::max(1, options.threads)),
      committed_(committed),
      previous_(store) {
  life_ = store_.max_life();
  is_fused_ = options_.undo_form == UndoForm::kFused;
  last_captured_ = dense_.newest() ? dense_.newest()->header.batch : committed;
  if (!store_.is_read_only()) thread_ = std::thread([this] { background(); });
}

Engine::~Engine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  snapshot_.reset();
  if (thread_.joinable()) thread_.join();
}

size_t Engine::add_group(const Group& group) {
  std::lock_guard lock(mutex_);
  groups_.push_back(group);
  return groups_.size() - 1;
}

// --- announce and lookup

std::shared_ptr<Step> Engine::fresh_step() {
  for (auto& step : all_steps_) {
    if (step.use_count() == 1) {
      const std::shared_ptr<Step> reused = step;
      reused->log = LogState::kNone;
      reused->is_sorting = reused->is_sorted = reused->overlap_pending = false;
      reused->is_next_mapped = reused->hand_off_closed = reused->has_flag = reused->is_blocked =
          false;
      reused->is_fused = reused->is_previous_logged = false;
      reused->background_ns = 0;
      reused->early.base = EarlyLookup::kNone;
      reused->num_tables = 0;
      return reused;
    }
  }
  all_steps_.push_back(std::make_shared<Step>());
  return all_steps_.back();
}

// The tables of the step's groups. A table belongs to one module, hence to one group.
void Engine::add_tables(Step& step) {
  step.num_tables = 0;
  step.place.assign(store_.tables().size(), kNoRecord);
  for (size_t g = 0; g < step.groups.size(); ++g) {
    const auto& features = groups_[step.groups[g].group].features;
    for (size_t f = 0; f < features.size(); ++f) {
      uint32_t& place = step.place[features[f].table];
      if (place == kNoRecord) {
        place = static_cast<uint32_t>(step.num_tables++);
        if (step.tables.size() < step.num_tables) step.tables.emplace_back();
        step.tables[place].table = features[f].table;
        step.tables[place].group = g;
        step.tables[place].features.clear();
      }
      step.tables[place].features.push_back(step.groups[g].features[f]);
    }
  }
}

uint64_t Engine::announce(const std::vector<GroupInput>& inputs) {
  store_.check_alive();
  const Traced traced(trace(), Phase::kAnnounce, 0);
  std::shared_ptr<Step> step;
  {
    std::lock_guard lock(mutex_);
    step = fresh_step();
  }
  step->groups.resize(inputs.size());
  for (size_t g = 0; g < inputs.size(); ++g)
    step->groups[g].assign(inputs[g], groups_[inputs[g].group], store_.tables());
  add_tables(*step);
  {
    std::lock_guard lock(mutex_);
    step->id = next_id_++;
    queue_.push_back(step);
  }
  changed_.notify_all();
  return step->id;
}

std::shared_ptr<Lookup> Engine::lookup(const GroupInput& input, float* out, bool is_training) {
  const Stopwatch watch;
  const Busy busy(form_choice_.busy_ns());
  const Traced traced(trace(), Phase::kLookup, committed_ + 1);
  const Group& spec = groups_[input.group];
  auto result = std::make_shared<Lookup>();
  {
    std::lock_guard lock(mutex_);
    for (const auto& step : queue_) {
      for (size_t g = 0; g < step->groups.size() && !result->step; ++g) {
        if (step->id != 0 && step->groups[g].equals(input, spec))
          result->step = step, result->index = g;
      }
      if (result->step) break;
    }
  }
  if (!result->step) result->own.assign(input, spec, store_.tables());
  const GroupBatch& batch = result->batch();
  if (is_training && options_.is_relaxed && previous_.is_known()) {
    look_up_relaxed(*result, out);
  } else {
    workers_.run(
        num_blocks(batch), [&](uint64_t block) { pool_block(batch, block, out); },
        batch.ids.size() >= kWorthSharing);
  }
  stats_.lookup_ns += watch.ns();
  stats_.lookups += batch.ids.size();
  return result;
}

void Engine::per_sample_weight_grad(const Lookup& lookup, const float* grad, float* result) {
  const GroupBatch& batch = lookup.batch();
  const Group& spec = groups_[batch.group];
  std::vector<float> kept(batch.is_filtered ? batch.ids.size() : 0);
  float* weight_grad = batch.is_filtered ? kept.data() : result;
  workers_.run(spec.features.size(), [&](uint64_t f) {
    tcxl::per_sample_weight_grad(store_.tables()[spec.features[f].table].view, batch.features[f], 0,
                                 batch.bags, grad, spec.stride, weight_grad);
  });
  if (batch.is_filtered) batch.spread(spec, kept, result);
}

// --- prepare

// One step out of several lookups (accumulation, a batch that was not announced): groups are
// concatenated.
std::shared_ptr<Step> Engine::merge(const std::vector<Part>& parts) {
  std::shared_ptr<Step> step = fresh_step();
  step->id = 0;
  step->groups.clear();
  merged_grads_.resize(groups_.size());
  grads_.clear();
  for (size_t g = 0; g < groups_.size(); ++g) {
    GroupBatch all;
    all.group = g;
    std::vector<const GroupBatch*> sources;
    std::vector<float>& grad = merged_grads_[g];
    grad.clear();
    for (const Part& part : parts) {
      const GroupBatch& batch = part.lookup->batch();
      if (batch.group != g) continue;
      sources.push_back(&batch);
      all.bags += batch.bags;
      all.has_weights |= batch.has_weights;
      if (part.grad != nullptr)
        grad.insert(grad.end(), part.grad, part.grad + batch.bags * groups_[g].stride);
    }
    if (sources.empty()) continue;
    for (size_t f = 0; f < groups_[g].features.size(); ++f) {
      for (const GroupBatch* source : sources) {
        const FeatureBags& bags = source->features[f];
        for (int64_t b = 0; b < source->bags; ++b) {
          all.offsets.push_back(static_cast<int64_t>(all.ids.size()));
          for (int64_t i = bags.offsets[b]; i < bags.offsets[b + 1]; ++i) {
            all.ids.push_back(bags.ids[i]);
            if (all.has_weights)
              all.weights.push_back(bags.weights != nullptr ? bags.weights[i] : 1.0f);
          }
        }
      }
    }
    all.offsets.push_back(static_cast<int64_t>(all.ids.size()));
    step->groups.push_back(std::move(all));
    GroupBatch& kept = step->groups.back();
    for (size_t f = 0; f < groups_[g].features.size(); ++f) {
      const GroupFeature& feature = groups_[g].features[f];
      kept.features.push_back(
          {kept.ids.data(), kept.offsets.data() + static_cast<int64_t>(f) * kept.bags,
           kept.has_weights ? kept.weights.data() : nullptr, feature.pooling, feature.column});
    }
    grads_.push_back(grad.data());
  }
  add_tables(*step);
  for (size_t g = 0; g < step->groups.size();
       ++g) {  // moving the group above moved no buffer, but be exact
    TCXL_ASSERT(step->groups[g].features.front().ids == step->groups[g].ids.data());
  }
  return step;
}

void Engine::prepare(const std::vector<Part>& parts, uint64_t through) {
  const Busy busy(form_choice_.busy_ns());
  const Traced traced(trace(), Phase::kPrepare, committed_ + 1);
  store_.check_alive();
  check_background();
  for (const Part& part : parts) {
    const GroupBatch& batch = part.lookup->batch();
    const uint64_t n = static_cast<uint64_t>(batch.bags * groups_[batch.group].stride);
    constexpr uint64_t kBlock = 1 << 16;
    std::atomic<bool> is_bad{false};
    workers_.run((n + kBlock - 1) / kBlock,
                 [&](uint64_t i) {
                   if (has_non_finite(part.grad + i * kBlock, std::min(kBlock, n - i * kBlock)))
                     is_bad = true;
                 },
                 n > 4 * kBlock);
    if (is_bad) {
      const auto bad = static_cast<uint64_t>(
          std::find_if(part.grad, part.grad + n, [](float v) { return !std::isfinite(v); }) -
          part.grad);
      const Group& spec = groups_[batch.group];
      const auto column = static_cast<int64_t>(bad) % spec.stride;
      std::string name;
      for (const GroupFeature& feature : spec.features) {
        if (feature.column <= column) name = feature.name;
      }
      fail(ErrorKind::kValue, "the gradient of feature '", name, "' is ", part.grad[bad],
           " in sample ", static_cast<int64_t>(bad) / spec.stride, " (column ", column,
           ")\n  state: the pool is unchanged, batch ", committed_ + 1,
           " is not committed\n  do:    skip the batch (run.skip()), lower the learning rate, or "
           "clip gradients");
    }
  }
  Lock lock(mutex_);
  if (prepared_ && !queue_.empty() && queue_.front() == prepared_ && prepared_->id == 0) {
    reset_log_from(lock, 0);  // an earlier prepare that was never committed
    queue_.pop_front();
  }
  prepared_.reset();
  const std::shared_ptr<Step> head = queue_.empty() ? nullptr : queue_.front();
  bool is_head =
      head && head->id == through && parts.size() == head->groups.size() && !parts.empty();
  std::vector<bool> used(head ? head->groups.size() : 0, false);
  for (const Part& part : parts) {
    is_head = is_head && part.lookup->step == head && !used[part.lookup->index];
    if (is_head) used[part.lookup->index] = true;
  }
  if (is_head) {
    grads_.assign(head->groups.size(), nullptr);
    for (const Part& part : parts) grads_[part.lookup->index] = part.grad;
    prepared_ = head;
    admit(lock, *head);
    return;
  }
  const std::shared_ptr<Step> merged = merge(parts);
  drop_through(lock, through);
  reset_log_from(lock, 0);
  if (!parts.empty()) ++stats_.unannounced;
  queue_.push_front(merged);
  prepared_ = merged;
  admit(lock, *merged);
  changed_.notify_all();
}

double Engine::grad_norm_sq() {
  Lock lock(mutex_);
  if (!prepared_) fail(ErrorKind::kPool, "no step is prepared");
  Step& step = *prepared_;
  ensure_sorted(lock, step);
  lock.unlock();
  double sum = 0;
  std::vector<double> norms;
  for (size_t t = 0; t < step.num_tables; ++t) {
    const StepTable& table = step.tables[t];
    const uint64_t rows = table.lookups.num_rows();
    norms.resize(rows);
    constexpr uint64_t kBlock = 4096;
    workers_.run((rows + kBlock - 1) / kBlock, [&](uint64_t i) {
      row_grad_norm_sq(table.lookups, grads_[table.group], store_.tables()[table.table].view.dim,
                       i * kBlock, std::min(rows, (i + 1) * kBlock), norms.data() + i * kBlock);
    });
    for (uint64_t r = 0; r < rows; ++r) sum += norms[r];
  }
  return sum;
}

}  // namespace tcxl
