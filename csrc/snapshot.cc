#include "snapshot.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crash_point.h"
#include "errors.h"
#include "file_calls.h"

namespace tcxl {

using namespace layout;

namespace {

constexpr uint64_t kChunk = 1 << 20;

// Makes the folder and marks it as incomplete before anything else is there.
OpenOptions prepare(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST)
    fail_os(errno, text("cannot create folder '", path, "'"));
  if (::access((path + "/log").c_str(), F_OK) == 0) {
    fail(ErrorKind::kPool, "'", path,
         "' holds a pool already\n  state: it is unchanged\n  do:    choose another path");
  }
  const std::string marker = path + kIncompleteSnapshot;
  const Fd fd(::open(marker.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (!fd.is_open()) fail_os(errno, text("cannot create '", marker, "'"));
  OpenOptions options;
  options.path = path;
  options.is_snapshot = true;
  return options;
}

}  // namespace

Snapshot::Snapshot(const Store& source, const DenseLog& dense, uint64_t batch,
                   const std::string& resume, const std::string& path)
    : source_(source),
      target_(prepare(path)),
      dense_(target_),
      resume_(resume),
      seen_(source.tables().size()) {
  if (!dense.newest() || dense.newest()->header.batch != batch)
    fail(ErrorKind::kPool,
         "the dense part of the committed batch is not written yet\n  do:    pool.snapshot() "
         "between "
         "two batches of a FaultTolerantRun, which writes it");
  const std::string records = path + "/records";
  records_.reset(std::fopen(records.c_str(), "w+x"));
  if (records_ == nullptr || ::unlink(records.c_str()) != 0)
    fail_os(errno, text("cannot make '", records, "'"));
  for (const Table& table : source.tables()) {
    target_.add_table(table.record);
    bytes_total_ += table.record.weight_bytes + table.record.state_bytes;
  }
  target_.commit_tables();
  slot_.batch = batch;
  const Generation& generation = *dense.newest();
  dense_.capture(slot_.batch, slot_.life, dense.read_resume(generation),
                 {{dense.blob(generation), generation.header.blob_bytes}});
}

Snapshot::~Snapshot() {
  is_cancelled_ = true;
  if (thread_.joinable()) thread_.join();
}

void Snapshot::start(const std::function<void()>& detach) {
  thread_ = std::thread([this, detach] {
    // The trainer comes first: on a busy machine the copy takes the time that is left.
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
    try {
      run(detach);
    } catch (...) {
      failure_ = std::current_exception();
      detach();
    }
    is_done_ = true;
  });
}

void Snapshot::take_records(const Step& step) {
  for (size_t t = 0; t < step.num_tables && record_error_.empty(); ++t) {
    const StepTable& table = step.tables[t];
    const TableView& view = source_.tables()[table.table].view;
    const auto dim = static_cast<uint64_t>(view.dim);
    const auto states = static_cast<uint64_t>(view.state_floats());
    std::vector<bool>& seen = seen_[table.table];
    if (seen.empty()) seen.resize(view.rows);
    for (uint64_t r = 0; r < table.lookups.num_rows(); ++r) {
      const Kept kept{table.table, table.lookups.rows[r]};
      if (seen[kept.row]) continue;
      seen[kept.row] = true;
      const RecordColumns& c = table.columns;
      const bool is_written =
          std::fwrite(&kept, sizeof kept, 1, records_.get()) == 1 &&
          std::fwrite(c.weight + r * dim, sizeof(float), dim, records_.get()) == dim &&
          std::fwrite(c.state + r * states, sizeof(float), states, records_.get()) == states;
      num_records_ += is_written ? 1 : 0;
      if (is_written) continue;
      record_error_ = std::strerror(errno);  // the snapshot fails, the training goes on
      is_cancelled_ = true;
      return;
    }
  }
}

void Snapshot::copy_column(const float* from, float* to, uint64_t bytes) {
  const auto* source = reinterpret_cast<const std::byte*>(from);
  auto* target = reinterpret_cast<std::byte*>(to);
  for (uint64_t at = 0; at < bytes && !is_cancelled_; at += kChunk) {
    const uint64_t n = std::min(kChunk, bytes - at);
    std::memcpy(target + at, source + at, n);
    bytes_done_ += n;
    crash_point("snapshot: chunk");
  }
}

void Snapshot::put_records_back() {
  std::FILE* file = records_.get();
  std::rewind(file);
  Kept kept;
  for (uint64_t i = 0; i < num_records_; ++i) {
    if (std::fread(&kept, sizeof kept, 1, file) != 1)
      fail_os(EIO, "cannot read the snapshot's records back");
    const TableView& view = target_.tables()[kept.table].view;
    const auto dim = static_cast<uint64_t>(view.dim);
    const auto states = static_cast<uint64_t>(view.state_floats());
    if (std::fread(view.weight + kept.row * dim, sizeof(float), dim, file) != dim ||
        std::fread(view.state + kept.row * states, sizeof(float), states, file) != states)
      fail_os(EIO, "cannot read the snapshot's records back");
  }
}

void Snapshot::complete() {
  while (!dense_.write_slice()) {
  }
  dense_.complete();
  dense_.publish();
  name_generation(slot_, *dense_.newest());
  target_.sync_all();
  crash_point("snapshot: before its slot");
  target_.write_slot(slot_, resume_);
  target_.mark_clean();
  if (::unlink((target_.path() + kIncompleteSnapshot).c_str()) != 0)
    fail_os(errno, text("cannot complete '", target_.path(), "'"));
  sync_folder(target_.path());
  target_.unlock();
}

void Snapshot::run(const std::function<void()>& detach) {
  for (size_t t = 0; t < source_.tables().size(); ++t) {
    const Table& from = source_.tables()[t];
    const Table& to = target_.tables()[t];
    copy_column(from.view.weight, to.view.weight, from.record.weight_bytes);
    if (from.record.state_bytes > 0)
      copy_column(from.view.state, to.view.state, from.record.state_bytes);
  }
  detach();
  // The last records may still be in the stream's buffer: rewind() would lose them without a word.
  if (record_error_.empty() && std::fflush(records_.get()) != 0)
    record_error_ = std::strerror(errno);
  if (!record_error_.empty()) {
    fail(ErrorKind::kFull, "cannot keep undo records of snapshot '", target_.path(),
         "': ", record_error_, "\n  do:    free space there, and take another snapshot");
  }
  if (is_cancelled_) fail(ErrorKind::kPool, "the snapshot was cancelled");
  put_records_back();
  complete();
}

void Snapshot::wait() {
  if (thread_.joinable()) thread_.join();
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace tcxl
