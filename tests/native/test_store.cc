// The pool's files: identity, geometry, slots, resume records, session, lock. Each of them is torn
// or flipped in turn; the newest valid copy wins, and where none is left the pool is refused.
#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "check.h"
#include "errors.h"
#include "pool_folder.h"

namespace {

using namespace tcxl;
using namespace tcxl::layout;
using namespace tcxl::test;

template <typename F>
ErrorKind kind_of(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.kind;
  }
  return static_cast<ErrorKind>(-1);
}

Slot slot_of(uint64_t batch) {
  Slot s{};
  s.batch = batch;
  s.dense_batch = kNoBatch;
  return s;
}

// A pool with one table and three commits, closed.
void make_pool(const PoolFolder& folder) {
  Store store(folder.options());
  store.add_table(table_record("a", 100, 8, OptimizerKind::kSgd));
  store.commit_tables();
  for (uint64_t n = 0; n < 3; ++n) store.write_slot(slot_of(n), "record " + std::to_string(n));
  store.mark_clean();
}

uint8_t byte_at(const PoolFolder& folder, uint64_t offset) {
  std::ifstream f(folder.file("log"), std::ios::binary);
  f.seekg(static_cast<std::streamoff>(offset));
  return static_cast<uint8_t>(f.get());
}

void flip(const PoolFolder& folder, uint64_t offset) {
  const auto byte = static_cast<uint8_t>(byte_at(folder, offset) ^ 4);
  folder.patch("log", offset, &byte, 1);
}

void test_create_and_open() {
  PoolFolder folder;
  std::string uuid;
  {
    Store store(folder.options());
    CHECK(store.was_created());
    CHECK(!store.slot());
    CHECK(store.tables().empty());
    uuid = store.uuid_text();
    CHECK_EQUAL(uuid.size(), size_t{36});
    CHECK_EQUAL(uuid[14], '4');
  }
  make_pool(folder);
  Store store(folder.options());
  CHECK(!store.was_created());
  CHECK(store.was_clean());
  CHECK_EQUAL(store.uuid_text(), uuid);
  CHECK_EQUAL(store.tables().size(), size_t{1});
  CHECK_EQUAL(store.tables()[0].name, std::string("a"));
  CHECK(store.slot() && store.slot()->batch == 2 && store.slot()->seq == 3);
  CHECK_EQUAL(store.read_resume(*store.slot()), std::string("record 2"));
  CHECK(kind_of([&] { Store second(folder.options()); }) == ErrorKind::kLocked);
}

// Tables that no geometry names are cut off by the next open, whatever was written to them.
void test_tables_without_geometry() {
  PoolFolder folder;
  {
    Store store(folder.options());
    store.add_table(table_record("a", 100000, 8, OptimizerKind::kSgd));
  }
  Store store(folder.options());
  CHECK(store.tables().empty());
  CHECK_EQUAL(std::filesystem::file_size(folder.file("data")), uintmax_t{0});
}

// Either copy of the geometry is enough; the newest that is valid holds.
void test_geometry_copies() {
  PoolFolder folder;
  make_pool(folder);
  uint64_t seq = 0;
  {
    Store store(folder.options());
    seq = store.geometry().seq;
    store.add_table(table_record("b", 10, 4, OptimizerKind::kAdagrad));
    store.commit_tables();
    CHECK_EQUAL(store.geometry().seq, seq + 1);
  }
  const uint64_t newest = ((seq + 1) & 1) != 0 ? kGeometryA : kGeometryB;
  const uint64_t older = newest == kGeometryA ? kGeometryB : kGeometryA;
  for (const uint64_t place :
       {uint64_t{8}, uint64_t{40}, uint64_t{124}, uint64_t{128 + 5}, uint64_t{128 + 256 + 130}}) {
    flip(folder, newest + place);
    {
      OpenOptions reader = folder.options();
      reader.read_only = true;
      Store store(reader);
      CHECK_EQUAL(store.tables().size(), size_t{1});  // torn: the table never was
    }
    flip(folder, newest + place);
  }
  flip(folder, older + 8);
  CHECK_EQUAL(Store(folder.options()).tables().size(), size_t{2});
  flip(folder, newest + 8);
  CHECK(kind_of([&] { Store store(folder.options()); }) == ErrorKind::kCorrupted);
}

// Each bit of the newest slot and of its record: without it the slot before is the commit.
void test_torn_slot() {
  PoolFolder folder;
  make_pool(folder);
  OpenOptions reader = folder.options();
  reader.read_only = true;
  for (uint64_t i = 0; i < sizeof(Slot); ++i) {
    flip(folder, kSlotB + i);  // seq 3
    Store store(reader);
    CHECK_CASE(store.slot() && store.slot()->batch == 1, "byte " + std::to_string(i));
    CHECK_EQUAL(store.read_resume(*store.slot()), std::string("record 1"));
    flip(folder, kSlotB + i);
  }
  flip(folder, kResumeB + 2);
  CHECK_EQUAL(Store(reader).slot()->batch, uint64_t{1});
  flip(folder, kSlotA + 20);
  CHECK(kind_of([&] { Store store(reader); }) == ErrorKind::kCorrupted);
}

// Slot A holds a copy of slot B, with its high number: it is not taken at the wrong place.
void test_slot_in_the_wrong_place() {
  PoolFolder folder;
  make_pool(folder);
  std::string slot(sizeof(Slot), '\0');
  std::ifstream f(folder.file("log"), std::ios::binary);
  f.seekg(static_cast<std::streamoff>(kSlotB));
  f.read(slot.data(), static_cast<std::streamsize>(slot.size()));
  folder.patch("log", kSlotA, slot.data(), slot.size());
  flip(folder, kSlotB + 20);
  CHECK(kind_of([&] { Store store(folder.options()); }) == ErrorKind::kCorrupted);
}

// The very first slot may be torn: nothing was ever committed.
void test_first_slot_torn() {
  PoolFolder folder;
  {
    Store store(folder.options());
    store.write_slot(slot_of(0), "first");
  }
  flip(folder, kSlotB + 20);
  Store store(folder.options());
  CHECK(!store.slot());
}

void test_resume_record_limit() {
  PoolFolder folder;
  Store store(folder.options());
  store.write_slot(slot_of(0), std::string(kResumeBytesMax, 'x'));
  CHECK_EQUAL(store.read_resume(*store.slot()).size(), size_t{kResumeBytesMax});
  CHECK(kind_of([&] { store.write_slot(slot_of(1), std::string(kResumeBytesMax + 1, 'x')); }) ==
        ErrorKind::kFull);
  CHECK_EQUAL(store.slot()->batch, uint64_t{0});
}

// After a poison nothing is written any more.
void test_poison() {
  PoolFolder folder;
  Store store(folder.options());
  store.write_slot(slot_of(0), "a");
  store.poison("the medium failed");
  CHECK(kind_of([&] { store.write_slot(slot_of(1), "b"); }) == ErrorKind::kPool);
  CHECK(kind_of([&] { store.commit_tables(); }) == ErrorKind::kPool);
  CHECK(kind_of([&] { store.mark_clean(); }) == ErrorKind::kPool);
  CHECK_EQUAL(store.slot()->batch, uint64_t{0});
}

void test_session() {
  PoolFolder folder;
  make_pool(folder);
  {
    Store store(folder.options());
    CHECK(store.was_clean());
    store.mark_open();
  }
  {
    Store store(folder.options());
    CHECK(!store.was_clean());  // same boot: opened
  }
  flip(folder, kSession + 20);  // another boot, or a damaged record
  CHECK(kind_of([&] { Store store(folder.options()); }) == ErrorKind::kRecovery);
  OpenOptions trusting = folder.options();
  trusting.trust_after_reboot = true;
  CHECK_EQUAL(Store(trusting).slot()->batch, uint64_t{2});
}

// No room: the error names path, needed and free bytes, the store goes on with what it has.
void test_no_room() {
  PoolFolder folder;
  Store store(folder.options());
  store.add_table(table_record("a", 100, 8, OptimizerKind::kSgd));
  store.commit_tables();
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 8 << 20;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    store.add_table(table_record("b", 10'000'000, 8, OptimizerKind::kSgd));
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::kFull);
    message = error.what();
  }
  CHECK(kind_of([&] { store.allocate_log(64 << 20); }) == ErrorKind::kFull);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(message.find(folder.file("data")) != std::string::npos);
  CHECK(message.find("are free") != std::string::npos);
  CHECK_EQUAL(store.tables().size(), size_t{1});
  CHECK_EQUAL(store.geometry().data_bytes, uint64_t{2 << 20});
  store.add_table(table_record("b", 1000, 8, OptimizerKind::kSgd));
  store.commit_tables();
}

// Growing maps the new bytes behind the old ones: pointers stay what they were.
void test_growth_moves_nothing() {
  PoolFolder folder;
  Store store(folder.options());
  const std::byte* base = store.data().base();
  for (int i = 0; i < 20; ++i) {
    store.add_table(table_record("t" + std::to_string(i), 100'000, 8, OptimizerKind::kAdagrad));
    store.tables().back().view.weight[0] = static_cast<float>(i);
  }
  CHECK(store.data().base() == base);
  for (int i = 0; i < 20; ++i) {
    CHECK_EQUAL(store.tables()[static_cast<size_t>(i)].view.weight[0], static_cast<float>(i));
  }
}

}  // namespace

int main() {
  test_create_and_open();
  test_tables_without_geometry();
  test_geometry_copies();
  test_torn_slot();
  test_slot_in_the_wrong_place();
  test_first_slot_torn();
  test_resume_record_limit();
  test_poison();
  test_session();
  test_no_room();
  test_growth_moves_nothing();
  return check_result();
}
