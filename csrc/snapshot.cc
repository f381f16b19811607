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

constexpr uint64_t kChunk = 256 << 10;  // little of a shared cache goes to what is copied
constexpr uint64_t kBlock = 1 << 20;    // of records, a write

// Runs `work` in a thread of the lowest priority: on a busy machine it takes the time that is left.
// A thread of its own: there is no way back, and one that waits for a CPU must hold no lock of the
// engine.
template <typename Work>
void run_aside(const Work& work) {
  std::exception_ptr failure;
  std::thread aside([&] {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  aside.join();
  if (failure) std::rethrow_exception(failure);
}

void write_all(int fd, const float* from, uint64_t bytes, uint64_t offset,
               const std::string& path) {
  const auto* at = reinterpret_cast<const std::byte*>(from);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd, at, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    // Nothing was allocated before: here is where a full medium shows.
    if (n < 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
      fail_allocation(errno, fd, path, bytes, offset + bytes);
    if (n <= 0) fail_os(n < 0 ? errno : EIO, text("cannot write '", path, "'"));
    at += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
}

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
  uint64_t rows = 0;
  for (const Table& table : source.tables()) {
    target_.add_table(table.record);
    rows_before_.push_back(rows_before_.empty() ? 0 : rows_before_.back() + rows);
    rows = table.record.rows;
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
    const uint64_t before = rows_before_[table.table];
    if (before + source_.tables()[table.table].view.rows <= copied_before_update_) continue;
    const TableView& view = source_.tables()[table.table].view;
    const uint64_t weight_bytes = static_cast<uint64_t>(view.dim) * sizeof(float);
    const uint64_t state_bytes = static_cast<uint64_t>(view.state_floats()) * sizeof(float);
    std::vector<bool>& seen = seen_[table.table];
    if (seen.empty()) seen.resize(view.rows);
    const RecordColumns& c = table.columns;
    for (uint64_t r = 0; r < table.lookups.num_rows(); ++r) {
      const Kept kept{table.table, table.lookups.rows[r]};
      if (before + kept.row < copied_before_update_ || seen[kept.row]) continue;
      seen[kept.row] = true;
      const size_t at = block_.size();
      block_.resize(at + sizeof kept + weight_bytes + state_bytes);
      std::memcpy(block_.data() + at, &kept, sizeof kept);
      std::memcpy(block_.data() + at + sizeof kept, c.weight + r * static_cast<uint64_t>(view.dim),
                  weight_bytes);
      if (state_bytes > 0)
        std::memcpy(block_.data() + at + sizeof kept + weight_bytes,
                    c.state + r * static_cast<uint64_t>(view.state_floats()), state_bytes);
      ++num_records_;
      if (block_.size() >= kBlock) keep_block();
    }
  }
}

// A write of a whole block passes by the stream's own buffer.
void Snapshot::keep_block() {
  const bool is_written =
      std::fwrite(block_.data(), 1, block_.size(), records_.get()) == block_.size();
  if (!is_written && record_error_.empty()) {  // the snapshot fails, the training goes on
    record_error_ = std::strerror(errno);
    is_cancelled_ = true;
  }
  block_.clear();
}

// By system calls: a store to the new file's mapping would fault each page in, and clear it first.
void Snapshot::copy_rows(size_t table, uint64_t begin, uint64_t end) {
  const Table& from = source_.tables()[table];
  const TableRecord& to = target_.tables()[table].record;
  const auto copy = [&](const float* column, uint64_t floats, uint64_t offset) {
    const uint64_t row_bytes = floats * sizeof(float);
    if (floats == 0) return;
    write_all(target_.data().fd(), column + begin * floats, (end - begin) * row_bytes,
              offset + begin * row_bytes, target_.data().path());
    bytes_done_ += (end - begin) * row_bytes;
  };
  copy(from.view.weight, static_cast<uint64_t>(from.view.dim), to.weight_offset);
  copy(from.view.state, static_cast<uint64_t>(from.view.state_floats()), to.state_offset);
}

void Snapshot::copy_tables() {
  for (size_t t = 0; t < source_.tables().size(); ++t) {
    const TableView& view = source_.tables()[t].view;
    const auto row_bytes = static_cast<uint64_t>(view.dim + view.state_floats()) * sizeof(float);
    const uint64_t step = std::max<uint64_t>(1, kChunk / row_bytes);
    for (uint64_t begin = 0; begin < view.rows && !is_cancelled_; begin += step) {
      const uint64_t end = std::min(view.rows, begin + step);
      copy_rows(t, begin, end);
      rows_copied_ = rows_before_[t] + end;
      crash_point("snapshot: chunk");
    }
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
  run_aside([this] { copy_tables(); });
  detach();
  keep_block();
  // The last records may still be in the stream's buffer: rewind() would lose them without a word.
  if (record_error_.empty() && std::fflush(records_.get()) != 0)
    record_error_ = std::strerror(errno);
  if (!record_error_.empty()) {
    fail(ErrorKind::kFull, "cannot keep undo records of snapshot '", target_.path(),
         "': ", record_error_, "\n  do:    free space there, and take another snapshot");
  }
  if (is_cancelled_) fail(ErrorKind::kPool, "the snapshot was cancelled");
  run_aside([this] {
    put_records_back();
    complete();
  });
}

void Snapshot::wait() {
  if (thread_.joinable()) thread_.join();
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace tcxl
