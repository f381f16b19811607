// The records of a store that change after its creation: geometry, commit slots, resume records.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crash_point.h"
#include "crc32c.h"
#include "errors.h"
#include "fault.h"
#include "file_calls.h"
#include "geometry.h"
#include "kernels.h"
#include "store.h"

namespace tcxl {

using namespace layout;

namespace {

bool is_odd(const Slot& slot) {
  return ((has_fault(Fault::kSlotByParity) ? slot.batch : slot.seq) & 1) != 0;
}

uint64_t slot_place(const Slot& slot) { return is_odd(slot) ? kSlotB : kSlotA; }

uint64_t resume_place(const Slot& slot) {
  return is_odd(slot) && !has_fault(Fault::kOneResumeArea) ? kResumeB : kResumeA;
}

}  // namespace

// --- geometry

bool Store::read_geometry_copy(uint64_t offset, GeometryHeader& header,
                               std::span<const TableRecord>& records) const {
  header = *log_.at<GeometryHeader>(offset);
  if (header.magic != kGeometryMagic || header.num_tables > kTablesMax) return false;
  GeometryHeader blank = header;
  blank.crc = 0;
  records = {log_.at<TableRecord>(offset + sizeof(GeometryHeader)), header.num_tables};
  return crc32c(crc_of(&blank, sizeof blank), records.data(), records.size_bytes()) == header.crc;
}

void Store::load_geometry() {
  GeometryHeader a{}, b{};
  std::span<const TableRecord> records_a, records_b;
  const bool valid_a = read_geometry_copy(kGeometryA, a, records_a);
  const bool valid_b = read_geometry_copy(kGeometryB, b, records_b);
  if (!valid_a && !valid_b) {
    fail(ErrorKind::kCorrupted, "pool '", options_.path, "' has no valid geometry\n  where: '",
         log_.path(), "', bytes ", kGeometryA, " and ", kGeometryB,
         "\n  state: nothing was changed\n  do:    ", kRestoreAll);
  }
  const bool use_a = valid_a && (!valid_b || a.seq > b.seq);
  geometry_ = use_a ? a : b;
  const std::span<const TableRecord> records = use_a ? records_a : records_b;
  std::string fault = geometry_fault(geometry_);
  if (fault.empty()) fault = overlap_fault(records);
  if (!fault.empty()) {
    fail(ErrorKind::kCorrupted, "the geometry of pool '", options_.path,
         "' cannot be true: ", fault, "\n  state: nothing was changed\n  do:    ", kRestoreAll);
  }
  tables_.reserve(records.size());
  for (const TableRecord& record : records) {
    const std::string name(record.name, ::strnlen(record.name, kTableNameBytes));
    tables_.push_back({name, record, {}});
  }
  const uint64_t have_log = device_bytes_ > 0 ? geometry_.log_bytes : file_bytes(log_fd_.get());
  if (have_log < geometry_.log_bytes) {
    fail(ErrorKind::kCorrupted, "'", log_.path(), "' has ", have_log,
         " bytes, the pool's geometry says ", geometry_.log_bytes,
         "\n  state: truncated; nothing was changed\n  do:    ", kRestoreAll);
  }
  if (device_bytes_ > 0) {
    // The data window of a device starts behind a log window of a quarter of it.
    const uint64_t window = device_bytes_ / 4 / kRegionAlign * kRegionAlign;
    if (geometry_.log_bytes > window || geometry_.data_bytes > device_bytes_ - window) {
      fail(ErrorKind::kCorrupted, "DAX device '", options_.device, "' has ", device_bytes_,
           " bytes, the pool's geometry says ", geometry_.log_bytes, " for its log and ",
           geometry_.data_bytes, " for its tables",
           "\n  state: nothing was changed\n  do:    use the device that holds the pool");
    }
    if (geometry_.log_bytes > log_.bytes()) log_.grow(geometry_.log_bytes, true);
    data_.map(log_fd_.get(), window, geometry_.data_bytes, medium_, options_.read_only,
              options_.device);
    return;
  }
  const uint64_t have_data = file_bytes(data_fd_.get());
  if (have_data < geometry_.data_bytes) {
    fail(ErrorKind::kCorrupted, "'", options_.path, "/data' has ", have_data,
         " bytes, the pool's geometry says ", geometry_.data_bytes,
         "\n  state: truncated; nothing was changed\n  do:    ", kRestoreAll);
  }
  // Tails beyond the geometry are of a growth that never completed.
  if (!options_.read_only && have_data > geometry_.data_bytes &&
      ::ftruncate(data_fd_.get(), static_cast<off_t>(geometry_.data_bytes)) != 0) {
    fail_os(errno, "cannot cut the pool's data file");
  }
  data_.map(data_fd_.get(), 0, geometry_.data_bytes, medium_, options_.read_only,
            options_.path + "/data");
}

void Store::bind_views() {
  for (Table& table : tables_) {
    const TableRecord& r = table.record;
    const auto kind = static_cast<OptimizerKind>(r.optimizer);
    if (const std::string fault = table_fault(r, data_.bytes()); !fault.empty()) {
      fail(ErrorKind::kCorrupted, "table '", table.name, "' of pool '", options_.path,
           "' does not fit the pool's data: ", fault,
           "\n  state: nothing was changed\n  do:    ", kRestoreAll);
    }
    table.view = {data_.at<float>(r.weight_offset),
                  state_floats(r) > 0 ? data_.at<float>(r.state_offset) : nullptr,
                  r.rows,
                  r.dim,
                  kind,
                  r.has_check != 0,
                  crc32c(0, &r.init_key, sizeof r.init_key)};
  }
}

uint64_t Store::allocate_log(uint64_t bytes) {
  const uint64_t offset = round_up(geometry_.log_bytes, kRegionAlign);
  const uint64_t end = offset + round_up(bytes, kRegionAlign);
  if (device_bytes_ > 0 && end > device_bytes_ / 4 / kRegionAlign * kRegionAlign)
    fail(ErrorKind::kFull, "the log window of '", options_.device,
         "', a quarter of the device, is full: ", end,
         " bytes are needed\n  do:    use a larger device, smaller batches, or a smaller "
         "log_bytes or keep_dense");
  log_.grow(end, options_.sparse);
  crash_point("log: space allocated");
  geometry_.log_bytes = end;
  return offset;
}

uint64_t Store::allocate_data(uint64_t bytes) {
  const uint64_t offset = round_up(geometry_.data_bytes, kRegionAlign);
  const uint64_t end = offset + round_up(bytes, kRegionAlign);
  if (device_bytes_ > 0 && device_bytes_ / 4 + end > device_bytes_)
    fail(ErrorKind::kFull, "DAX device '", options_.device, "' has ", device_bytes_,
         " bytes, the tables need ", end + device_bytes_ / 4,
         "\n  do:    use a larger device, or smaller tables");
  // All rows of a snapshot are written by system calls before any is stored to: no page of a table
  // is missing then, and the trainer, which begins it, does not wait for their allocation.
  data_.grow(end, options_.sparse || options_.is_snapshot);
  crash_point("data: space allocated");
  geometry_.data_bytes = end;
  return offset;
}

size_t Store::add_table(const TableRecord& record) {
  check_alive();
  if (tables_.size() >= kTablesMax)
    fail(ErrorKind::kFull, "a pool holds at most ", kTablesMax,
         " tables\n  do:    let features share tables, or use several pools");
  Table table;
  table.record = record;
  table.name.assign(record.name, ::strnlen(record.name, kTableNameBytes));
  TableRecord& r = table.record;
  const GeometryHeader before = geometry_;
  try {
    r.weight_bytes = r.rows * r.dim * sizeof(float);
    r.state_bytes = r.rows * state_floats(r) * sizeof(float);
    r.weight_offset = allocate_data(r.weight_bytes);
    r.state_offset = r.state_bytes > 0 ? allocate_data(r.state_bytes) : r.weight_offset;
  } catch (const Error&) {
    geometry_ = before;
    throw;
  }
  tables_.push_back(table);
  bind_views();
  return tables_.size() - 1;
}

void Store::commit_tables() {
  if (durability_ == DurabilityLevel::kPower && options_.device.empty() &&
      sync_file(data_fd_.get()) != 0)
    fail_sync(errno, "/data");
  write_geometry(geometry_);
}

void Store::write_geometry(GeometryHeader next) {
  check_alive();
  next.magic = kGeometryMagic;
  next.seq = geometry_.seq + 1;
  next.num_tables = tables_.size();
  next.crc = 0;
  const uint64_t offset = (next.seq & 1) != 0 ? kGeometryA : kGeometryB;
  auto* records = log_.at<TableRecord>(offset + sizeof(GeometryHeader));
  for (size_t t = 0; t < tables_.size(); ++t) records[t] = tables_[t].record;
  crash_point("geometry: records");
  next.crc = crc32c(crc_of(&next, sizeof next), records, tables_.size() * sizeof(TableRecord));
  // The files' new sizes first; then this copy. The other one stands until it is whole.
  if (durability_ == DurabilityLevel::kPower && options_.device.empty() &&
      !has_fault(Fault::kNoSizeSync) && sync_file(log_fd_.get()) != 0)
    fail_sync(errno, "/log");
  // One checksum covers header and records: a torn write leaves this copy invalid and the other one
  // newest.
  *log_.at<GeometryHeader>(offset) = next;
  if (!has_fault(Fault::kNoGeometryPersist))
    persistence_.persist(log_.base() + offset,
                         sizeof(GeometryHeader) + tables_.size() * sizeof(TableRecord));
  make_durable(log_.base() + offset, sizeof(GeometryHeader) + tables_.size() * sizeof(TableRecord));
  geometry_ = next;
}

// --- slots

// A copy is checked, not the mapped bytes: while a trainer runs they may change between check and
// use.
void Store::read_slots() {
  for (const uint64_t offset : {kSlotA, kSlotB}) {
    const Slot s = *log_.at<Slot>(offset);
    if (s.magic != kSlotMagic || s.crc != checksum(s) || s.resume_bytes > kResumeBytesMax) continue;
    if (slot_place(s) != offset) continue;
    const std::string resume(log_.at<char>(resume_place(s)), s.resume_bytes);
    if (crc_of(resume.data(), resume.size()) != s.resume_crc) continue;
    if (slot_ && s.seq <= slot_->seq) continue;
    slot_ = s;
    found_resume_ = resume;
  }
}

void Store::load_slots() {
  constexpr int kTries =
      100;  // a trainer may be writing: each try finds a valid slot unless two commits overtake it
  read_slots();
  for (int i = 1; i < kTries && !slot_ && options_.unlocked; ++i) read_slots();
  if (slot_ && std::max({slot_->seq, slot_->batch, slot_->life}) > kCountMax) {
    fail(ErrorKind::kCorrupted, "the commit slot of pool '", options_.path,
         "' cannot be true: number ", slot_->seq, ", batch ", slot_->batch, ", life ", slot_->life,
         "\n  state: nothing was changed\n  do:    ", kRestoreAll);
  }
  if (has_fault(Fault::kRewindNotGoneOnWith) && slot_) slot_->rolling_back = 0;
  const bool untouched = is_zero(log_.base() + kSlotA, 2 * kPage);
  if (needs_journal()) return;  // torn slots are what a power failure leaves; the journal tells
  if (!slot_ && !untouched) {
    // The very first slot may be torn by a crash; anything later leaves its predecessor valid.
    const bool first_only = is_zero(log_.base() + kSlotA, kPage) && log_.at<Slot>(kSlotB)->seq <= 1;
    if (!first_only) {
      fail(ErrorKind::kCorrupted, "pool '", options_.path, "' has no valid commit slot\n  where: '",
           log_.path(), "', bytes ", kSlotA, " and ", kSlotB,
           "\n  state: nothing was changed\n  do:    ", copy_advice(options_.path));
    }
  }
}

void Store::write_slot(Slot next, const std::string& resume) {
  check_alive();
  if (resume.size() > kResumeBytesMax) {
    fail(ErrorKind::kFull, "the resume record has ", resume.size(), " bytes, at most ",
         kResumeBytesMax,
         " fit\n  do:    keep large state in the model or optimizer, not in `state` objects");
  }
  next.magic = kSlotMagic;
  next.seq = slot_ ? slot_->seq + 1 : 1;
  next.geometry_seq = geometry_.seq;
  std::byte* record = log_.base() + resume_place(next);
  std::memcpy(record, resume.data(), resume.size());
  next.resume_bytes = static_cast<uint32_t>(resume.size());
  next.resume_crc = crc_of(resume.data(), resume.size());
  if (!has_fault(Fault::kNoResumePersist)) persistence_.persist(record, resume.size());
  next.crc = checksum(next);
  auto* place = log_.at<Slot>(slot_place(next));
  *place = next;
  const bool stays = has_fault(Fault::kNoSlotPersist) ||
                     (has_fault(Fault::kRewindWithoutEvidence) && next.rolling_back == kRewinding);
  if (!stays) persistence_.persist(place, sizeof next);
  slot_ = next;
}

void Store::restart(const Slot& slot, const std::string& resume) {
  std::memset(log_.base() + kDirectory, 0, kDirectoryBytes);
  persistence_.persist(log_.base() + kDirectory, kDirectoryBytes);
  write_slot(slot, resume);
}

void Store::forget_creation() {
  for (const uint64_t offset : {kSlotA, kSlotB}) {
    const Slot s = *log_.at<Slot>(offset);
    if (s.magic != kSlotMagic || s.crc != checksum(s) || s.seq <= 1) continue;
    fail(ErrorKind::kCorrupted, "'", options_.path,
         "/journal' is missing or holds no valid slot\n  state: nothing was changed; the machine "
         "restarted while the pool was open, and only its journal tells what is durable\n  do:    ",
         kRestoreAll);
  }
  std::memset(log_.base() + kSlotA, 0, 2 * kPage);
  persistence_.persist(log_.base() + kSlotA, 2 * kPage);
  make_durable(log_.base() + kSlotA, 2 * kPage);
  slot_.reset();
}

std::string Store::read_resume(const Slot& slot) const {
  if (options_.read_only) return found_resume_;
  return std::string(log_.at<char>(resume_place(slot)), slot.resume_bytes);
}

}  // namespace tcxl
