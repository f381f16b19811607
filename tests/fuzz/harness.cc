#include "harness.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core_pool.h"
#include "errors.h"
#include "journal_recovery.h"
#include "repair.h"

namespace tcxl::fuzz {

namespace {

const char* kind_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kPool:
      return "pool";
    case ErrorKind::kLocked:
      return "locked";
    case ErrorKind::kCorrupted:
      return "corrupted";
    case ErrorKind::kFull:
      return "full";
    case ErrorKind::kVersion:
      return "version";
    case ErrorKind::kDurability:
      return "durability";
    case ErrorKind::kRecovery:
      return "recovery";
    case ErrorKind::kIndex:
      return "index";
    case ErrorKind::kValue:
      return "value";
    case ErrorKind::kOs:
      return "os";
  }
  return "?";
}

[[noreturn]] void fail_invariant(const Input& input, const std::string& what) {
  std::fprintf(stderr, "finding: %s\n%s", what.c_str(), print(input).c_str());
  std::abort();
}

void set_field(TemplatePool& pool, const Operation& o) {
  const Field& field = fields()[o.target];
  const auto& places = pool.at(field.structure);
  if (places.empty()) return;
  const Place& place = places[o.index % places.size()];
  auto* bytes = pool.image.edit<std::byte>(place.file, place.offset + field.offset, field.bytes);
  if (bytes == nullptr) return;
  uint64_t value = 0;
  std::memcpy(&value, bytes, field.bytes);
  value = o.action == Action::kSet   ? o.value
          : o.action == Action::kAdd ? value + o.value
                                     : value ^ o.value;
  std::memcpy(bytes, &value, field.bytes);
}

void write_values(FileImage& file, const Operation& o) {
  const uint64_t count = std::min<uint64_t>(o.count, file.bytes_from(o.offset) / sizeof o.value);
  std::byte* to = file.edit(o.offset, count * sizeof o.value);
  for (uint64_t i = 0; to != nullptr && i < count; ++i)
    std::memcpy(to + i * sizeof o.value, &o.value, sizeof o.value);
}

void copy_bytes(PoolImage& image, const Operation& o) {
  const auto from = static_cast<FileIndex>(o.target % kNumFiles);
  const auto to = static_cast<FileIndex>(o.target / kNumFiles);
  const uint64_t count = o.value >> 32, offset = o.value & 0xffffffff;
  constexpr uint64_t kCopyMax = 256 << 10;
  const auto* source = image.read<std::byte>(from, o.offset, count);
  if (count > kCopyMax || source == nullptr) return;
  auto* target = image.edit<std::byte>(to, offset, count);
  if (target != nullptr) std::memmove(target, source, count);
}

void apply(TemplatePool& pool, const Operation& o) {
  const auto file = static_cast<FileIndex>(o.target % kNumFiles);
  switch (o.action) {
    case Action::kSet:
    case Action::kAdd:
    case Action::kXor:
      return set_field(pool, o);
    case Action::kWrite:
      return write_values(pool.image.files[file], o);
    case Action::kCopy:
      return copy_bytes(pool.image, o);
    case Action::kSize:
      return pool.image.files[file].resize(o.offset);
    case Action::kRemove:
      return pool.image.files[file].remove();
  }
}

std::unique_ptr<CorePool> open(const std::string& folder, const TemplatePool& pool,
                               const Input& input, bool is_reboot) {
  const bool is_read_only = input.mode >= OpenMode::kReadExact;
  const bool trusts = input.mode >= OpenMode::kVerify;
  return std::make_unique<CorePool>(folder, "", pool.has_power ? "power" : "process", is_read_only,
                                    input.mode == OpenMode::kInspect, trusts,
                                    pool.has_power ? "block" : "", is_reboot, true);
}

std::string verify_all(CorePool& core) {
  std::vector<Damage> found = verify(core.store());
  verify_journal(core.store(), found);
  std::string all;
  for (const Damage& d : found) all += d.region + ", " + d.where + ": " + d.what + "\n";
  return all;
}

// What a pool that was opened for writing promises: opened again, it is at the same point and has
// nothing left to undo (docs/format.md, invariant 7).
void check_again(const std::string& folder, const TemplatePool& pool, const Input& input,
                 const RecoveryReport& first) {
  try {
    const auto core = open(folder, pool, input, false);
    const RecoveryReport again = core->recover(input.mode == OpenMode::kExact);
    if (again.has_point != first.has_point || again.resumed_batch != first.resumed_batch ||
        again.rows_changed != 0 || again.resume != first.resume)
      fail_invariant(input, text("a second recovery went from batch ", first.resumed_batch, " to ",
                                 again.resumed_batch, " and changed ", again.rows_changed));
    core->close(true);
  } catch (const Error& error) {
    if (is_counted_out(pool.image)) return;
    fail_invariant(input, text("a recovered pool cannot be opened again: ", error.what()));
  }
}

std::string open_and_use(const std::string& folder, const TemplatePool& pool, const Input& input) {
  auto core = open(folder, pool, input, input.is_reboot);
  if (input.mode == OpenMode::kVerify) {
    core->repair_points();
    return verify_all(*core);
  }
  if (input.mode == OpenMode::kInspect) {
    const auto evidence = core->evidence();
    return evidence ? core->dense().read_resume(*evidence) : "";
  }
  const RecoveryReport report =
      core->recover(input.mode == OpenMode::kExact || input.mode == OpenMode::kReadExact);
  const bool is_read_only = core->store().is_read_only();
  if (is_read_only && report.has_point) core->rewind_points();
  core->close(false);
  core.reset();
  if (!is_read_only) check_again(folder, pool, input, report);
  return "";
}

}  // namespace

Harness::Harness() {
  const char* parent = std::getenv("TRAININGCXL_FUZZ_FOLDER");  // who sets it removes what is left
  if (parent == nullptr) parent = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  root_ = text(parent, "/trainingcxl-fuzz-XXXXXX");
  if (::mkdtemp(root_.data()) == nullptr) fail_os(errno, text("cannot make folder '", root_, "'"));
}

Harness::~Harness() {
  std::error_code ignored;
  std::filesystem::remove_all(root_, ignored);
}

std::string Harness::folder_of(size_t number) const {
  return text(root_, "/", kPoolNames[number], ".pool");
}

TemplatePool& Harness::pool(size_t number) {
  auto& entry = pools_[number];
  if (!entry) {
    entry = std::make_unique<TemplatePool>();
    const std::string folder = root_ + "/template.pool";
    build_pool(number, folder, *entry);
    std::filesystem::remove_all(folder);
    std::filesystem::create_directory(folder_of(number));
    const std::ofstream lock(folder_of(number) + "/lock");  // readers make none
  }
  return *entry;
}

void Harness::build_all() {
  for (size_t number = 0; number < kNumPools; ++number) pool(number);
}

Outcome Harness::run(const Input& input) {
  TemplatePool& pool = this->pool(input.pool);
  pool.image.restore();
  for (const Operation& o : input.operations) {
    if (!o.is_late) apply(pool, o);
  }
  if (!input.is_broken) repair(pool.image);
  for (const Operation& o : input.operations) {
    if (o.is_late) apply(pool, o);
  }
  const std::string folder = folder_of(input.pool);
  pool.image.write_to(folder);
  if (input.mode < OpenMode::kReadExact) pool.image.forget_written();
  Outcome outcome;
  outcome.is_past_superblock =
      passes_superblock(pool.image, pool.has_power, input.mode >= OpenMode::kReadExact);
  try {
    outcome.message = open_and_use(folder, pool, input);
    outcome.is_open = true;
    outcome.result =
        outcome.message.empty() || input.mode != OpenMode::kVerify ? "opens" : "damage";
  } catch (const Error& error) {
    outcome.result = kind_name(error.kind);
    outcome.message = error.what();
  }
  return outcome;
}

}  // namespace tcxl::fuzz
