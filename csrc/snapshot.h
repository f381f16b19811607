// A consistent copy of one committed batch, taken while training goes on (docs/durability.md,
// "Snapshots"). The tables are copied as they change; the undo records of every batch that commits
// meanwhile say what its rows held before, and the oldest record of a row is its value at the
// snapshot's batch. Rows that were copied before the first update of them need none.
//
// The training must not feel it: the copy has the lowest priority and neither faults pages in
// nor clears them (pwrite), and what the trainer itself does is one pass over its undo records.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dense_log.h"
#include "step.h"
#include "store.h"

namespace tcxl {

class Snapshot {
 public:
  // Makes a new pool at `path` with the tables of `source`, and takes the dense part of its
  // committed batch: no update may run. Throws what creating a pool throws.
  Snapshot(const Store& source, const DenseLog& dense, uint64_t batch, const std::string& resume,
           const std::string& path);
  ~Snapshot();

  // Starts copying. detach: returns once no later batch can be seen by what was copied, and calls
  // take_records() no more.
  void start(const std::function<void()>& detach);
  // Before rows change for the next batch. Trainer thread.
  void begin_update() { copied_before_update_ = rows_copied_; }
  // Of a batch that has committed, before its undo records may go. Trainer thread.
  void take_records(const Step& step);

  uint64_t batch() const { return slot_.batch; }
  uint64_t bytes_done() const { return bytes_done_; }
  uint64_t bytes_total() const { return bytes_total_; }
  bool is_done() const { return is_done_; }
  // Waits. Throws what the copying thread met; the snapshot is then no pool.
  void wait();
  void cancel() { is_cancelled_ = true; }

 private:
  struct Kept {  // in front of the bytes of a row and its state
    uint64_t table, row;
  };
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void run(const std::function<void()>& detach);
  void copy_tables();
  void copy_rows(size_t table, uint64_t begin, uint64_t end);
  void keep_block();
  void put_records_back();
  void complete();

  const Store& source_;
  Store target_;
  DenseLog dense_;
  layout::Slot slot_{};
  std::string resume_;
  std::vector<std::vector<bool>> seen_;  // rows whose record was taken
  std::vector<uint64_t> rows_before_;    // of the tables before each
  // Rows of all tables, in their order, that are copied; the same when an update began.
  std::atomic<uint64_t> rows_copied_ = 0;
  uint64_t copied_before_update_ = 0;
  std::vector<std::byte> block_;  // records on their way to the file
  std::unique_ptr<std::FILE, CloseFile> records_;
  std::string record_error_;
  uint64_t num_records_ = 0;
  std::atomic<uint64_t> bytes_done_ = 0;
  uint64_t bytes_total_ = 0;
  std::atomic<bool> is_done_ = false, is_cancelled_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace tcxl
