// The guest's program of the virtual machine rig (run.py): opens a pool of level `power` or makes
// it, compares it bit for bit with a training in plain memory, trains on, and says on standard
// output which batch is durable. Whoever reads that may stop the machine at any moment.
//
//   vm_train NAME POOL LIFE BATCHES [DEVICE]          (environment: control=early, ready=FOLDER)
//
// Lines are "@NAME opening exact|latest", "@NAME opened {...}", "@NAME durable BATCH DENSE" and
// "@NAME done {...}". LIFE varies what can be chosen in a pool; BATCHES: end in order after so
// many. control=early: pools of level `process` that are called durable, on persistent memory also
// without undo records: the rig must find that.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core_pool.h"
#include "row_check.h"
#include "trainer.h"

namespace {

using namespace tcxl;
using namespace tcxl::vm;

constexpr uint64_t kDenseEvery[] = {1, 3, 7};
constexpr UndoForm kForms[] = {UndoForm::kAuto, UndoForm::kFused, UndoForm::kBackground};

struct Arguments {
  std::string name, pool, device;
  uint64_t life = 0, batches = 0;
  bool is_early = false;
  bool is_exact() const { return life % 2 == 0; }
};

// In one piece: other programs write to the same console.
void say(const Arguments& arguments, const std::string& what) {
  const std::string line = "@" + arguments.name + " " + what + "\n";
  if (::write(STDOUT_FILENO, line.data(), line.size()) < 0) std::exit(3);
}

// For a JSON string on one line.
std::string one_line(std::string message) {
  for (char& c : message) c = c == '\n' || c == '"' || c == '\\' ? ' ' : c;
  return message;
}

// Whether the kernel took MAP_SYNC for the mapping of `base`: its flag "sf" in smaps.
bool is_map_sync(const std::byte* base) {
  std::ifstream smaps("/proc/self/smaps");
  std::ostringstream start;
  start << std::hex << reinterpret_cast<uintptr_t>(base) << '-';
  bool is_inside = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.rfind(start.str(), 0) == 0) is_inside = true;
    if (is_inside && line.rfind("VmFlags:", 0) == 0)
      return (line + " ").find(" sf ") != std::string::npos;
  }
  return false;
}

// Until every program of the guest has opened its pool: one that is fast would else train thousands
// of batches, which every later life trains again in plain memory. One that failed does not count.
void wait_for_others(const Arguments& arguments) {
  const char* folder = std::getenv("ready");
  const char* all = std::getenv("machines");
  if (folder == nullptr || all == nullptr) return;
  std::ofstream(std::string(folder) + "/" + arguments.name).put('1');
  const std::string machines = all;
  const auto wanted = 1 + std::count(machines.begin(), machines.end(), ',');
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(90);
  while (std::chrono::steady_clock::now() < limit) {
    std::filesystem::directory_iterator files(folder);
    if (std::distance(begin(files), end(files)) >= wanted) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

class Training {
 public:
  explicit Training(const Arguments& arguments) : arguments_(arguments) {}

  // Returns whether the pool was as it must be.
  bool open() {
    say(arguments_, arguments_.is_exact() ? "opening exact" : "opening latest");
    std::string fault = look_as_reader();
    const auto began = std::chrono::steady_clock::now();
    pool_ = open_pool(false);
    const RecoveryReport report = pool_->recover(arguments_.is_exact());
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
    EngineOptions options;
    options.threads = 2;
    options.without_log = arguments_.is_early && pool_->store().medium().kind != MediumKind::kBlock;
    options.undo_form = kForms[arguments_.life % std::size(kForms)];
    pool_->start(options);
    pool_->engine().set_dense_every(kDenseEvery[arguments_.life % std::size(kDenseEvery)]);
    if (!report.has_point) create_tables();
    add_group();
    if (fault.empty()) fault = compare(report);
    say_opened(report, took.count(), fault);
    if (!report.has_point) capture(0);
    batch_ = report.resumed_batch;
    return fault.empty();
  }

  void train() {
    const uint64_t last = batch_ + arguments_.batches;
    std::optional<uint64_t> announced;
    say_durable();
    for (Batch batch = make_batch(batch_ + 1); batch_ < last;) {
      if (!announced) announced = pool_->engine().announce({input(batch)});
      Batch next = make_batch(batch_ + 2);
      const uint64_t next_id = pool_->engine().announce({input(next)});
      step(batch, *announced);
      announced = next_id;
      batch = std::move(next);
      say_durable();
    }
  }

  // Ends in order; the pool must then be at its last batch for a reader, and for the next trainer.
  bool close() {
    pool_->engine().drop_announced();
    pool_->engine().wait_dense();
    pool_->close(true);
    pool_.reset();
    reference_.train_through(batch_);
    const std::string reader = look_at_end(true), trainer = look_at_end(false);
    say(arguments_, text("done {\"batch\": ", batch_, ", \"reader\": \"", reader,
                         "\", \"trainer\": \"", trainer, "\"}"));
    return reader.empty() && trainer.empty();
  }

 private:
  std::unique_ptr<CorePool> open_pool(bool read_only) const {
    return std::make_unique<CorePool>(arguments_.pool, arguments_.device,
                                      arguments_.is_early ? "process" : "power", read_only, false,
                                      arguments_.is_early, "", false, false);
  }

  void say_opened(const RecoveryReport& report, double milliseconds, const std::string& fault) {
    const Store& store = pool_->store();
    say(arguments_,
        text("opened {\"medium\": \"", medium_name(store.medium().kind), "\", \"map_sync\": ",
             is_map_sync(store.log().base()) ? "true" : "false", ", \"flush\": \"",
             store.persistence().instruction(), "\", \"page_bytes\": ", store.log().page_bytes(),
             ", \"has_point\": ", report.has_point ? "true" : "false",
             ", \"committed\": ", report.committed_batch, ", \"resumed\": ", report.resumed_batch,
             ", \"rolled_back\": ", report.rows_rolled_back, ", \"changed\": ", report.rows_changed,
             ", \"milliseconds\": ", milliseconds, ", \"fault\": \"", fault, "\"}"));
  }

  // A reader must find what the trainer will, without changing anything.
  std::string look_as_reader() {
    try {
      const auto pool = open_pool(true);
      CorePool& reader = *pool;
      const RecoveryReport report = reader.recover(arguments_.is_exact());
      if (!report.has_point) return "";
      reference_.train_through(report.resumed_batch);
      const uint64_t different = reference_.count_different(reader.store());
      if (different == 0) return "";
      return text("for a reader, ", different, " rows differ from batch ", report.resumed_batch);
    } catch (const Error& error) {
      // There is no pool yet, or its creation was cut.
      return error.kind == ErrorKind::kPool ? "" : "for a reader: " + one_line(error.what());
    }
  }

  void create_tables() {
    Store& store = pool_->store();
    if (store.tables().empty()) {
      for (const Shape& shape : kShapes) store.add_table(record_of(shape));
    }
    const Persistence& p = store.persistence();
    for (const Table& table : store.tables()) {
      const TableView& v = table.view;
      const auto dim = static_cast<uint64_t>(v.dim);
      const auto states = static_cast<uint64_t>(v.state_floats());
      initialize_rows(v.weight, v.dim, 0, v.rows, kSeed, v.rows, kScale);
      p.flush(v.weight, v.rows * dim * sizeof(float));
      if (states == 0) continue;
      std::memset(v.state, 0, v.rows * states * sizeof(float));
      if (v.has_check) set_checks(v, 0, v.rows);
      p.flush(v.state, v.rows * states * sizeof(float));
    }
    Persistence::fence();
    store.commit_tables();
  }

  void add_group() {
    Group group;
    for (size_t t = 0; t < std::size(kShapes); ++t) {
      group.features.push_back({kShapes[t].name, t, Pooling::kSum, group.stride, -1});
      group.stride += kShapes[t].dim;
    }
    pool_->engine().add_group(group);
  }

  // What is wrong with the recovered pool; empty if nothing is.
  std::string compare(const RecoveryReport& report) {
    const uint64_t batch = report.resumed_batch;
    reference_.train_through(batch);
    if (const uint64_t bad = reference_.count_different(pool_->store()); bad > 0)
      return text(bad, " rows differ from those of batch ", batch);
    if (!report.has_point) return "";
    const auto generation = pool_->evidence();
    if (!generation) return "no dense part";
    // "latest" keeps the older dense part under the newer batch.
    const auto expected = dense_part(report.dense_batch);
    if (generation->header.blob_bytes != expected.size() * sizeof(uint64_t) ||
        std::memcmp(pool_->dense().blob(*generation), expected.data(),
                    expected.size() * sizeof(uint64_t)) != 0)
      return check_older_dense(*generation, batch);
    return check_resume(report);
  }

  // After "latest" a dense part is found under a batch that is not its own: any older one will do.
  std::string check_older_dense(const Generation& generation, uint64_t batch) {
    uint64_t first = 0;
    std::memcpy(&first, pool_->dense().blob(generation), sizeof first);
    for (uint64_t older = batch + 1; older-- > 0;) {
      const auto expected = dense_part(older);
      if (expected[0] == first)
        return std::memcmp(pool_->dense().blob(generation), expected.data(), kDenseBytes) == 0
                   ? ""
                   : text("the dense part of batch ", older, " is damaged");
    }
    return "the dense part is of no batch";
  }

  std::string check_resume(const RecoveryReport& report) const {
    const bool is_own = report.resume == resume_record(report.resumed_batch) ||
                        report.resume == resume_record(report.dense_batch);
    return is_own ? "" : "the resume record is of another batch";
  }

  // What is wrong with the closed pool; empty if nothing is.
  std::string look_at_end(bool read_only) const {
    try {
      const auto pool = open_pool(read_only);
      CorePool& again = *pool;
      const bool was_clean = again.store().was_clean();
      const RecoveryReport report = again.recover(false);
      const uint64_t different = reference_.count_different(again.store());
      std::string fault;
      if (!was_clean) fault += "not closed; ";
      if (report.resumed_batch != batch_) fault += text("at batch ", report.resumed_batch, "; ");
      if (different > 0) fault += text(different, " rows differ; ");
      std::vector<Damage> damages = verify(again.store());
      verify_journal(again.store(), damages);
      verify_rows(again.store(), damages);
      for (const Damage& damage : damages) fault += one_line(damage.what) + "; ";
      again.close(true);
      return fault;
    } catch (const Error& error) {
      return one_line(error.what());
    }
  }

  GroupInput input(const Batch& batch) const {
    GroupInput in;
    in.bags = kBags;
    in.values = batch.values.data();
    in.num_values = static_cast<int64_t>(batch.values.size());
    in.offsets = batch.offsets.data();
    in.num_offsets = static_cast<int64_t>(batch.offsets.size());
    return in;
  }

  void step(const Batch& batch, uint64_t id) {
    Engine& engine = pool_->engine();
    std::vector<float> pooled(static_cast<size_t>(kBags * stride()));
    const auto lookup = engine.lookup(input(batch), pooled.data(), true);
    const std::vector<float> grad = gradient(batch, pooled);
    engine.prepare({{lookup, grad.data()}}, id);
    const std::vector<RowSettings> settings(std::size(kShapes), {kLearningRate, kEps});
    batch_ = engine.commit(settings, 1.0f, resume_record(batch_ + 1));
    if (engine.is_dense_due()) capture(batch_);
  }

  void capture(uint64_t batch) {
    const auto words = dense_part(batch);
    pool_->engine().capture(resume_record(batch),
                            {{words.data(), words.size() * sizeof(uint64_t)}});
  }

  // The dense part is as durable as its batch.
  void say_durable() {
    const uint64_t durable =
        pool_->journal() ? pool_->journal()->durable_batch() : pool_->engine().committed();
    const uint64_t dense = pool_->engine().dense_batch();
    if (dense <= durable) durable_dense_ = dense;
    say(arguments_, text("durable ", durable, " ", durable_dense_));
  }

  const Arguments& arguments_;
  std::unique_ptr<CorePool> pool_;
  Reference reference_;
  uint64_t batch_ = 0, durable_dense_ = 0;
};

}  // namespace

int main(int count, char** given) {
  if (count < 5) {
    std::fprintf(stderr, "usage: vm_train NAME POOL LIFE BATCHES [DEVICE]\n");
    return 2;
  }
  Arguments arguments{given[1], given[2], count > 5 ? given[5] : ""};
  arguments.life = std::strtoull(given[3], nullptr, 10);
  arguments.batches = std::strtoull(given[4], nullptr, 10);
  const char* control = std::getenv("control");
  arguments.is_early = control != nullptr && std::string(control) == "early";
  try {
    Training training(arguments);
    if (!training.open()) return 1;
    wait_for_others(arguments);
    training.train();
    return training.close() ? 0 : 1;
  } catch (const std::exception& error) {
    say(arguments, "error " + one_line(error.what()));
    return 1;
  }
}
