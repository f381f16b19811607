#include "store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "crash_point.h"
#include "crc32c.h"
#include "errors.h"
#include "fault.h"
#include "file_calls.h"
#include "geometry.h"
#include "lock.h"

namespace tcxl {

using namespace layout;

namespace {

const std::string& boot_id() {
  static const std::string id = [] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string line;
    std::getline(file, line);
    return line;
  }();
  return id;
}

// A file with the content of a DAX device, say a copy of it.
bool is_device_image(int fd) {
  struct stat status;
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

// A DAX device has no file size; sysfs has it.
uint64_t device_size(const std::string& device, int fd) {
  if (is_device_image(fd)) return file_bytes(fd);
  const std::string name = device.substr(device.rfind('/') + 1);
  std::ifstream file("/sys/bus/dax/devices/" + name + "/size");
  uint64_t bytes = 0;
  if (!(file >> bytes)) {
    fail(ErrorKind::kPool, "cannot read the size of DAX device '", device,
         "'\n  do:    check the name: 'daxctl list' shows the DAX devices of this machine");
  }
  return bytes;
}

}  // namespace

uint32_t Store::crc_of(const void* p, uint64_t bytes) const { return crc32c(crc_seed_, p, bytes); }

Store::Store(const OpenOptions& options) : options_(options) {
  if (options.durability != DurabilityLevel::kNone) durability_ = options.durability;
  if (!options_.read_only && ::mkdir(options_.path.c_str(), 0777) != 0 && errno != EEXIST) {
    fail_os(errno, text("cannot create pool folder '", options_.path, "'"));
  }
  if (!options_.is_snapshot && ::access((options_.path + kIncompleteSnapshot).c_str(), F_OK) == 0) {
    fail(
        ErrorKind::kPool, "'", options_.path,
        "' is a snapshot that was never completed: its training ended while it was taken\n  do:    "
        "remove the folder and take another snapshot");
  }
  take_lock();
  try {
    open_files();
    load_superblock();
    load_geometry();
    read_session();
    load_slots();
    check_session();
    bind_views();
  } catch (...) {
    unlock();  // no destructor runs for an object that was never made
    throw;
  }
}

Store::~Store() { unlock(); }

void Store::disown() {
  static_cast<void>(lock_fd_.release());
  log_.forget();
  data_.forget();
}

void Store::unlock() {
  if (!lock_fd_.is_open()) return;
  forget_in_children(lock_fd_.get());
  lock_fd_.reset();
}

void Store::take_lock() {
  if (options_.unlocked) return;
  lock_fd_ = lock_pool(options_.path, !options_.read_only);
  close_in_children(lock_fd_.get());
  if (!options_.read_only) sign_lock(lock_fd_);
}

void Store::open_files() {
  const int flags = (options_.read_only ? O_RDONLY : O_RDWR | O_CREAT) | O_CLOEXEC;
  const bool on_device = !options_.device.empty();
  const std::string log_path = on_device ? options_.device : options_.path + "/log";
  const std::string data_path = on_device ? options_.device : options_.path + "/data";
  log_fd_ = Fd(::open(log_path.c_str(), on_device ? flags & ~O_CREAT : flags, 0666));
  if (!log_fd_.is_open() && options_.read_only && errno == ENOENT) {
    fail(ErrorKind::kPool, "'", on_device ? options_.device : options_.path, "' holds no pool",
         on_device ? "\n  do:    check the name of the device"
                   : "\n  do:    check the path; training creates a pool; of one on a DAX device "
                     "name the device, too (--device)");
  }
  if (!log_fd_.is_open()) fail_os(errno, text("cannot open '", log_path, "'"));
  if (!on_device) data_fd_ = Fd(::open(data_path.c_str(), flags, 0666));
  if (!on_device && !data_fd_.is_open() && errno == ENOENT) {
    fail(ErrorKind::kCorrupted, "'", data_path, "' is missing\n  do:    ", kRestoreAll);
  }
  if (!on_device && !data_fd_.is_open()) fail_os(errno, text("cannot open '", data_path, "'"));
  // Probing MAP_SYNC needs a page in the file; a new log gets its head first.
  const uint64_t bytes =
      on_device ? device_size(options_.device, log_fd_.get()) : file_bytes(log_fd_.get());
  const bool is_empty = !on_device && bytes < kHeadBytes;
  if (is_empty && options_.read_only) {
    fail(ErrorKind::kCorrupted, "'", log_path, "' has ", bytes,
         " bytes, a pool's log has at least ", kHeadBytes, "\n  do:    ", kRestoreAll,
         "; nothing was changed");
  }
  if (is_empty && bytes > 0) {
    // Leftover of a creation that never completed is all zeros; anything else is not ours to
    // overwrite.
    std::vector<std::byte> head(bytes);
    if (const int error = read_exactly(log_fd_.get(), head.data(), bytes, 0); error != 0)
      fail_os(error, text("cannot read '", log_path, "'"));
    if (!is_zero(head.data(), bytes)) {
      fail(ErrorKind::kCorrupted, "'", log_path, "' has ", bytes,
           " bytes, a pool's log has at least ", kHeadBytes,
           "\n  state: truncated or foreign; nothing was changed\n  do:    ", kRestoreAll,
           ", or choose another path");
    }
  }
  if (is_empty) {
    refuse_orphaned_data();
    const int error = allocate(log_fd_.get(), 0, kHeadBytes);
    if (error != 0) {
      if (::ftruncate(log_fd_.get(), 0) != 0) fail_os(errno, text("cannot empty '", log_path, "'"));
      fail_allocation(error, log_fd_.get(), log_path, kHeadBytes, kHeadBytes);
    }
  }
  medium_ = probe_medium(log_fd_.get(), options_.force_medium);
  if (on_device && is_device_image(log_fd_.get())) {
    if (!options_.read_only && options_.force_medium != medium_name(MediumKind::kDevDax)) {
      fail(ErrorKind::kPool, "'", options_.device,
           "' is a file, no DAX device: it can only be read\n  do:    name a DAX device "
           "(/dev/daxX.Y), or leave the device out: the pool's folder takes the files of its own");
    }
    medium_.kind = MediumKind::kDevDax;
  }
  if (on_device && bytes < kHeadBytes) {
    fail(ErrorKind::kPool, "'", options_.device, "' has ", bytes, " bytes, a pool needs at least ",
         kHeadBytes, "\n  do:    use a larger device");
  }
  refuse_weaker_medium();
  if (on_device) {
    device_bytes_ = bytes;
    log_.map(log_fd_.get(), 0, kHeadBytes, medium_, options_.read_only, log_path);
  } else {
    log_.map(log_fd_.get(), 0, std::max(kHeadBytes, bytes / kPage * kPage), medium_,
             options_.read_only, log_path);
  }
}

void Store::fail_byte_order() const {
  fail(ErrorKind::kVersion, "pool '", options_.path,
       "' was written on a machine of the other byte order",
       "\n  state: nothing was changed\n  do:    train it on such a machine");
}

void Store::load_superblock() {
  auto valid = [&](uint64_t offset) {
    const auto* s = log_.at<Superblock>(offset);
    return s->magic == kSuperblockMagic &&
           s->crc == crc32c(0, s, sizeof(Superblock) - sizeof(uint32_t));
  };
  const bool a = valid(kSuperblockA), b = valid(kSuperblockB);
  if (!a && !b && log_.at<Superblock>(kSuperblockA)->magic == __builtin_bswap64(kSuperblockMagic))
    fail_byte_order();
  if (!a && !b) {
    // Creation writes geometry and session before the superblock: only slots say that it went on.
    const bool never =
        is_zero(log_.base() + kSuperblockA, kPage) && is_zero(log_.base() + kSlotA, 2 * kPage);
    const bool torn = !is_zero(log_.base() + kSuperblockB, kPage);
    if (!never) {
      fail(ErrorKind::kCorrupted, "'", log_.path(), "' has no valid superblock",
           "\n  where: bytes 0 and ", kSuperblockB,
           "\n  state: damaged, or not a TrainingCXL pool; nothing was changed",
           "\n  do:    ", kRestoreAll, ", or choose another path");
    }
    if (options_.read_only)
      fail(ErrorKind::kPool, "creation of pool '", options_.path,
           "' never completed\n  do:    run the training command; it creates the pool anew");
    create(torn);
    return;
  }
  superblock_ = *log_.at<Superblock>(a ? kSuperblockA : kSuperblockB);
  if (superblock_.endian_mark != kEndianMark) fail_byte_order();
  if (superblock_.major != kFormatMajor || (superblock_.incompat & ~kIncompat) != 0) {
    fail(ErrorKind::kVersion, "pool '", options_.path, "' has format ", superblock_.major,
         " (incompatible features 0x", std::hex, superblock_.incompat,
         "), this build reads format ", std::dec, kFormatMajor,
         "\n  state: nothing was changed\n  do:    ",
         superblock_.major < kFormatMajor
             ? "go on with the trainingcxl that made it, or train in a new pool"
             : "install a newer trainingcxl");
  }
  if (superblock_.head_bytes != kHeadBytes || superblock_.directory_entries != kDirectoryEntries) {
    fail(ErrorKind::kVersion, "pool '", options_.path, "' has a head of ", superblock_.head_bytes,
         " bytes with ", superblock_.directory_entries, " log frames, this build knows ",
         kHeadBytes, " and ", kDirectoryEntries,
         "\n  state: nothing was changed\n  do:    use the build that made it");
  }
  if ((superblock_.ro_compat & ~kRoCompat) != 0 && !options_.read_only) {
    fail(ErrorKind::kVersion, "pool '", options_.path, "' has features 0x", std::hex,
         superblock_.ro_compat,
         " that this build can only read\n  do:    open it read only, or install a newer "
         "trainingcxl");
  }
  load_durability();
  persistence_ = options_.read_only ? Persistence() : Persistence(durability_, medium_.kind);
  crc_seed_ = crc32c(0, superblock_.uuid, sizeof superblock_.uuid);
  if (!a && !options_.read_only) {  // heal the damaged copy from the good one
    *log_.at<Superblock>(kSuperblockA) = superblock_;
    persistence_.persist(log_.at<Superblock>(kSuperblockA), sizeof(Superblock));
  }
}

// Tables are made after the superblock: these are of a pool that lost its log, or not ours at all.
void Store::refuse_orphaned_data() const {
  const uint64_t bytes = data_fd_.is_open() ? file_bytes(data_fd_.get()) : 0;
  if (bytes == 0) return;
  fail(ErrorKind::kCorrupted, "'", options_.path, "/data' has ", bytes, " bytes, but '",
       options_.path,
       "/log' is missing, empty or not of a pool\n  state: nothing was changed\n  do:    ",
       kRestoreAll, ", or choose another path");
}

void Store::create(bool is_leftover) {
  if (is_leftover) creation_note_ = "creation of this pool had not completed; it is created anew";
  persistence_ = Persistence(durability_, medium_.kind);
  refuse_orphaned_data();
  std::memset(log_.base(), 0, kHeadBytes);
  crash_point("create: head cleared");
  Superblock s{};
  s.magic = kSuperblockMagic;
  s.major = kFormatMajor;
  s.compat = kCompat, s.ro_compat = kRoCompat, s.incompat = kIncompat;
  s.endian_mark = kEndianMark;
  s.durability = static_cast<uint32_t>(durability_);
  if (::getrandom(s.uuid, sizeof s.uuid, 0) != sizeof s.uuid)
    fail_os(errno, "cannot draw a pool uuid");
  s.uuid[6] = static_cast<uint8_t>((s.uuid[6] & 0x0f) | 0x40);  // RFC 9562, version 4
  s.uuid[8] = static_cast<uint8_t>((s.uuid[8] & 0x3f) | 0x80);
  s.head_bytes = kHeadBytes;
  s.directory_entries = kDirectoryEntries;
  s.crc = crc32c(0, &s, sizeof s - sizeof(uint32_t));
  crc_seed_ = crc32c(0, s.uuid, sizeof s.uuid);
  superblock_ = s;
  const auto write_superblocks = [&] {
    for (const uint64_t offset : {kSuperblockB, kSuperblockA}) {
      *log_.at<Superblock>(offset) = s;
      persistence_.persist(log_.at<Superblock>(offset), sizeof s);
      // One is whole before the other begins: a torn copy alone would look like damage.
      if (!has_fault(Fault::kJournalNoSuperblockSync))
        make_durable(log_.at<Superblock>(offset), sizeof s);
    }
  };
  if (has_fault(Fault::kNoSuperblockOrder)) write_superblocks();
  geometry_ = {};
  geometry_.log_bytes = kHeadBytes;
  write_geometry(geometry_);
  mark_open();
  if (durability_ == DurabilityLevel::kPower && options_.device.empty()) {
    if (sync_file(log_fd_.get()) != 0) fail_sync(errno, "/log");
    if (sync_file(data_fd_.get()) != 0) fail_sync(errno, "/data");
    if (!has_fault(Fault::kNoFolderSync)) sync_folder(options_.path);
    if (!has_fault(Fault::kNoParentSync))
      sync_folder(options_.path + "/..");  // the pool itself is an entry there
  }
  write_superblocks();
  was_created_ = true;
}

// --- session

void Store::read_session() {
  const auto* s = log_.at<Session>(kSession);
  const bool valid = s->magic == kSessionMagic && s->crc == checksum(*s);
  was_clean_ = valid && s->clean == 1;
  had_failed_sync_ = valid && s->sync_failed != 0;
  is_same_boot_ = valid && !options_.assume_reboot &&
                  boot_id() == std::string(s->boot_id, ::strnlen(s->boot_id, sizeof s->boot_id));
}

void Store::check_session() {
  if (was_created_ || was_clean_ || is_same_boot_ || durability_ != DurabilityLevel::kProcess ||
      !slot_)
    return;
  if (options_.trust_after_reboot || options_.unlocked) return;
  fail(ErrorKind::kRecovery, "the machine restarted while pool '", options_.path,
       "' was open, and its durability is 'process'",
       "\n  state: rows may be torn or old; nothing was changed\n  do:    if the machine was shut "
       "down in order (no power loss), open with "
       "trust_after_reboot; else restore a copy or start anew");
}

void Store::mark_open() {
  Session s{};
  s.magic = kSessionMagic;
  const std::string& id = boot_id();
  std::memcpy(s.boot_id, id.data(), std::min(id.size(), sizeof s.boot_id - 1));
  s.crc = checksum(s);
  *log_.at<Session>(kSession) = s;
  persistence_.persist(log_.at<Session>(kSession), sizeof s);
  // The flag guards against a restart, so it must reach the medium before the first change does:
  // its page alone, since after a kill the whole log may wait to be written.
  // A snapshot in the making is guarded by the file that says so, and its trainer must not wait.
  if (medium_.kind != MediumKind::kBlock || options_.is_snapshot ||
      has_fault(Fault::kJournalNoSessionSync))
    return;
  if (sync_mapped(log_.base() + kSession, kPage) != 0) fail_sync(errno, "/log");
}

void Store::sync_all() {
  check_alive();
  if (medium_.kind != MediumKind::kBlock) return;
  if (sync_file_data(data_fd_.get()) != 0) fail_sync(errno, "/data");
  if (sync_file_data(log_fd_.get()) != 0) fail_sync(errno, "/log");
}

void Store::make_durable(void* p, uint64_t bytes) {
  if (!has_journal() || bytes == 0) return;
  // Of a shared mapping msync writes and syncs the file's range, and that alone.
  if (sync_mapped(p, bytes) != 0) fail_sync(errno, "/log");
}

void Store::mark_clean() {
  sync_all();
  auto* s = log_.at<Session>(kSession);
  Session next = *s;
  next.clean = 1;
  next.crc = checksum(next);
  *s = next;
  persistence_.persist(s, sizeof next);
  sync_all();
}

std::string Store::uuid_text() const {
  static const char* digits = "0123456789abcdef";
  std::string out;
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) out += '-';
    out += digits[superblock_.uuid[i] >> 4];
    out += digits[superblock_.uuid[i] & 15];
  }
  return out;
}

void discard_pool(const std::string& path) {
  Fd lock = lock_pool(path, true);
  for (const char* name : {"/log", "/data", "/journal"}) {
    if (::unlink((path + name).c_str()) != 0 && errno != ENOENT)
      fail_os(errno, text("cannot remove '", path, name, "'"));
  }
}

}  // namespace tcxl
