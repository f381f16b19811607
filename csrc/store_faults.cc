// What a store does when its medium fails: nothing any more, and it says so to whoever opens it
// next.
#include <cstring>

#include "errors.h"
#include "store.h"

namespace tcxl {

using namespace layout;

void Store::distrust() const {
  auto* s = log_.at<Session>(kSession);
  s->clean = 0;
  s->sync_failed = 1;
  s->crc = checksum(*s);
}

void Store::fail_sync(int error, const char* name) {
  const std::string what = sync_failed(error, options_.path + name);
  distrust();
  poison(what.substr(0, what.find('\n')));
  throw Error(ErrorKind::kOs, what, error);
}

void Store::poison(const std::string& why) {
  const std::lock_guard lock(poison_mutex_);
  if (poisoned_.empty()) poisoned_ = why;
}

void Store::note_told() const {
  const std::lock_guard lock(poison_mutex_);
  is_told_ = !poisoned_.empty();
}

bool Store::is_poison_told() const {
  const std::lock_guard lock(poison_mutex_);
  return is_told_;
}

bool Store::is_poisoned() const {
  const std::lock_guard lock(poison_mutex_);
  return !poisoned_.empty();
}

void Store::check_alive() const {
  if (options_.read_only) {
    fail(ErrorKind::kPool, "pool '", options_.path,
         "' is open read only\n  do:    open it without read_only to change it");
  }
  const std::lock_guard lock(poison_mutex_);
  if (!poisoned_.empty()) {
    is_told_ = true;
    fail(
        ErrorKind::kPool, "pool '", options_.path, "' cannot be used any more: ", poisoned_,
        "\n  state: what was durable before still is\n  do:    look at the medium and the kernel's "
        "log, then open the pool again; it recovers");
  }
}

// The level that the pool was created with; who names one must name that.
void Store::load_durability() {
  const auto recorded = static_cast<DurabilityLevel>(superblock_.durability);
  if (!options_.read_only && recorded != DurabilityLevel::kProcess &&
      recorded != DurabilityLevel::kPower) {
    fail(
        ErrorKind::kDurability, "pool '", options_.path, "' has a durability level ",
        superblock_.durability,
        " that this build does not know\n  state: nothing was changed\n  do:    use the build that "
        "made it");
  }
  const bool is_asked = !options_.read_only && options_.durability != DurabilityLevel::kNone;
  if (is_asked && recorded != options_.durability) {
    fail(ErrorKind::kDurability, "pool '", options_.path, "' was created with durability '",
         durability_name(recorded), "', '", durability_name(options_.durability),
         "' was asked for\n  do:    ask for '", durability_name(recorded),
         "', or create a new pool");
  }
  durability_ = recorded;
  refuse_weaker_medium();
}

// A level is never weakened: the medium gives it, or the pool is not opened.
void Store::refuse_weaker_medium() const {
  if (durability_ == DurabilityLevel::kPower && medium_.is_network && !options_.read_only) {
    fail(ErrorKind::kDurability, "durability 'power' is not available on a network file system (",
         medium_.file_system, ", '", options_.path,
         "'): nobody here can tell what its server keeps when it fails\n  do:    use durability "
         "'process' (survives kill -9), or put the pool on a local disk");
  }
  if (durability_ == DurabilityLevel::kPower && medium_.kind == MediumKind::kTmpfs &&
      !options_.read_only) {
    fail(ErrorKind::kDurability, "durability 'power' is impossible on ", medium_.file_system, " ('",
         options_.path,
         "'): its bytes are gone when the machine stops\n  do:    use durability 'process', or put "
         "the pool on a local disk or on persistent memory");
  }
}

}  // namespace tcxl
