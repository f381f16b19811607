// Test instrument: a record of what reaches a pool's files, and in which order it may survive a
// power failure: stores, flushes, fences, syncs, sizes. The crash rig (tests/crash) makes from it
// the states that a power failure could leave behind and recovers each of them.
//
// Stores are found by comparing the mapped files with a copy: at a flush the flushed lines, at a
// fence or another crash point every page that was ever flushed or seen to change, at a mark
// everything. Nothing of this runs unless a record was begun.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tcxl::recording {

enum class Kind : uint32_t {
  kStore = 0,  // words `first_word` ... of the record changed, order among them unknown
  kFlush,      // lines [offset, offset + bytes) as they are now: durable with this thread's fence
  kFence,
  kSize,       // the file has `bytes` bytes now
  kSyncBegin,  // fsync, fdatasync or msync: the file is durable as it is now, or its bytes
               // [offset, offset + bytes) where there are some ...
  kSyncEnd,    // ... from here on
  kFolder,     // entries of folder `name` are durable
  kPoint,      // crash point `name`
  kMark,       // what the rig said: `name`
};

struct Event {
  Kind kind;
  uint32_t thread;
  uint32_t file;  // index in the paths that start() was given
  uint32_t name;  // index in names
  uint64_t offset, bytes;
  uint64_t first_word, num_words;
};
static_assert(sizeof(Event) == 48);

struct Record {
  std::vector<Event> events;
  std::vector<uint64_t> places;  // of changed words, in words from the start of their file
  std::vector<uint64_t> values;
  std::vector<std::string> names;
};

struct Delay {
  std::string point;  // how the crash point's name begins
  uint64_t microseconds;
};

// Records the files at `paths`, there or not yet there, from now on. Pools must be opened after it.
// `delays`: what a slow medium does, so that other threads get ahead.
void start(const std::vector<std::string>& paths, const std::vector<Delay>& delays = {});
Record stop();
bool is_on();

// --- hooks; each does nothing unless a record was begun
void map(const std::string& path, int fd, const std::byte* base, uint64_t bytes);
void unmap(const std::byte* base);
void flush(const void* p, size_t bytes);  // a FlushFunction
void point(const char* name);             // "fence" is one
void sync_begin(int fd);
void sync_end(int fd);
void sync_begin(const void* p, uint64_t bytes);  // of mapped bytes alone
void sync_end(const void* p);
void folder(const std::string& path);
void resized(int fd);  // the file was made, or has another size
// Bytes given to pwrite, after it returned.
void written(int fd, uint64_t offset, const void* data, uint64_t bytes);
void punched(int fd, uint64_t offset, uint64_t bytes);  // they read as zero now
void mark(const std::string& text);

}  // namespace tcxl::recording
