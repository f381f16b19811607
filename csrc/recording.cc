#include "recording.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>

#include "crash_point.h"
#include "layout.h"

namespace tcxl::recording {

namespace {

constexpr uint64_t kWord = sizeof(uint64_t);
constexpr uint64_t kPageWords = layout::kPage / kWord;
constexpr uint64_t kManyBytes = 64 << 10;  // a larger flush does not make its pages watched

struct File {
  std::string path;
  std::vector<uint64_t> shadow;  // as it was seen last
  uint64_t bytes = 0;
  bool exists = false;
  const std::byte* base = nullptr;
  uint64_t mapped = 0;
  std::vector<bool> is_watched;  // per page
  std::vector<uint64_t> watched;
};

struct Recorder {
  std::mutex mutex;
  std::vector<File> files;
  Record record;
  std::map<std::string, uint32_t> name_index;
  std::vector<Delay> delays;
};

std::atomic<bool> on{false};
std::atomic<uint32_t> threads{0};

Recorder& recorder() {
  static Recorder the_recorder;
  return the_recorder;
}

uint32_t this_thread() {
  thread_local const uint32_t number = threads.fetch_add(1);
  return number;
}

uint32_t index_of(Recorder& r, const std::string& name) {
  const auto [at, is_new] = r.name_index.emplace(name, r.record.names.size());
  if (is_new) r.record.names.push_back(name);
  return at->second;
}

Event& add(Recorder& r, Kind kind, size_t file = 0) {
  Event event{};
  event.kind = kind;
  event.thread = this_thread();
  event.file = static_cast<uint32_t>(file);
  event.first_word = r.record.places.size();
  r.record.events.push_back(event);
  return r.record.events.back();
}

// Other threads may be storing: every word is read once, as a whole.
void compare(Recorder& r, File& file, uint64_t from_word, uint64_t to_word) {
  const auto* now = reinterpret_cast<const uint64_t*>(file.base);
  for (uint64_t w = from_word; w < to_word; ++w) {
    const uint64_t value = __atomic_load_n(now + w, __ATOMIC_RELAXED);
    if (value == file.shadow[w]) continue;
    file.shadow[w] = value;
    r.record.places.push_back(w);
    r.record.values.push_back(value);
  }
}

void watch(File& file, uint64_t page) {
  if (page >= file.is_watched.size() || file.is_watched[page]) return;
  file.is_watched[page] = true;
  file.watched.push_back(page);
}

// Adds the words that changed since `first_word` as a store, if there are any.
void add_store(Recorder& r, size_t file, uint64_t first_word) {
  const uint64_t words = r.record.places.size() - first_word;
  if (words == 0) return;
  Event& event = add(r, Kind::kStore, file);
  event.first_word = first_word;
  event.num_words = words;
}

void compare_page(Recorder& r, File& file, uint64_t page) {
  if (std::memcmp(file.base + page * layout::kPage, file.shadow.data() + page * kPageWords,
                  layout::kPage) == 0)
    return;
  watch(file, page);
  compare(r, file, page * kPageWords, (page + 1) * kPageWords);
}

void compare_all(Recorder& r, bool watched_only) {
  for (size_t f = 0; f < r.files.size(); ++f) {
    File& file = r.files[f];
    if (file.base == nullptr) continue;
    const uint64_t first = r.record.places.size();
    const uint64_t pages = file.mapped / layout::kPage;
    if (watched_only) {
      for (size_t i = 0; i < file.watched.size(); ++i) {
        if (file.watched[i] < pages) compare_page(r, file, file.watched[i]);
      }
    } else {
      for (uint64_t page = 0; page < pages; ++page) compare_page(r, file, page);
    }
    add_store(r, f, first);
  }
}

void set_size(Recorder& r, size_t f, uint64_t bytes) {
  File& file = r.files[f];
  if (bytes == file.bytes && file.exists) return;
  file.bytes = bytes;
  file.exists = true;
  const uint64_t pages = (bytes + layout::kPage - 1) / layout::kPage;
  file.shadow.resize(pages * kPageWords, 0);
  file.is_watched.resize(pages, false);
  std::erase_if(file.watched, [&](uint64_t page) { return page >= pages; });
  add(r, Kind::kSize, f).bytes = bytes;
}

File* find(Recorder& r, const std::string& path) {
  for (File& file : r.files) {
    if (file.path == path) return &file;
  }
  return nullptr;
}

File* find(Recorder& r, int fd) {
  struct stat wanted, status;
  if (::fstat(fd, &wanted) != 0) return nullptr;
  for (File& file : r.files) {
    if (::stat(file.path.c_str(), &status) == 0 && status.st_ino == wanted.st_ino &&
        status.st_dev == wanted.st_dev) {
      set_size(r, static_cast<size_t>(&file - r.files.data()),
               static_cast<uint64_t>(wanted.st_size));
      return &file;
    }
  }
  return nullptr;
}

File* find(Recorder& r, const void* p) {
  const auto* byte = static_cast<const std::byte*>(p);
  for (File& file : r.files) {
    if (file.base != nullptr && byte >= file.base && byte < file.base + file.mapped) return &file;
  }
  return nullptr;
}

size_t index_in(const Recorder& r, const File* file) {
  return static_cast<size_t>(file - r.files.data());
}

}  // namespace

bool is_on() { return on.load(std::memory_order_relaxed); }

void start(const std::vector<std::string>& paths, const std::vector<Delay>& delays) {
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  r.files.clear();
  r.record = {};
  r.name_index.clear();
  r.delays = delays;
  for (const std::string& path : paths) {
    File& file = r.files.emplace_back();
    file.path = path;
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0) continue;
    file.exists = true;
    if (::fstat(fd, &status) == 0) {
      file.bytes = static_cast<uint64_t>(status.st_size);
      const uint64_t pages = (file.bytes + layout::kPage - 1) / layout::kPage;
      file.shadow.resize(pages * kPageWords, 0);
      file.is_watched.resize(pages, false);
      if (::pread(fd, file.shadow.data(), file.bytes, 0) != status.st_size) file.shadow.clear();
    }
    ::close(fd);
  }
  on = true;
  __atomic_fetch_or(&internal::crash_points_armed, internal::kRecorded, __ATOMIC_RELAXED);
}

Record stop() {
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  on = false;
  __atomic_fetch_and(&internal::crash_points_armed, ~internal::kRecorded, __ATOMIC_RELAXED);
  r.files.clear();
  return std::move(r.record);
}

void map(const std::string& path, int fd, const std::byte* base, uint64_t bytes) {
  if (!is_on()) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  File* file = find(r, path);
  struct stat status;
  if (file == nullptr || ::fstat(fd, &status) != 0) return;
  set_size(r, index_in(r, file), static_cast<uint64_t>(status.st_size));
  file->base = base;
  file->mapped = bytes;
  compare_all(r, false);
}

void unmap(const std::byte* base) {
  if (!is_on()) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  File* file = find(r, base);
  if (file == nullptr) return;
  compare_all(r, false);
  file->base = nullptr;
  file->mapped = 0;
}

void flush(const void* p, size_t bytes) {
  if (!is_on() || bytes == 0) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  File* file = find(r, p);
  if (file == nullptr) return;
  const auto at = static_cast<uint64_t>(static_cast<const std::byte*>(p) - file->base);
  const uint64_t begin = at / layout::kLine * layout::kLine;
  const uint64_t end = std::min(file->mapped, layout::round_up(at + bytes, layout::kLine));
  const uint64_t first = r.record.places.size();
  if (end - begin > kManyBytes) {
    for (uint64_t page = begin / layout::kPage; page < (end + layout::kPage - 1) / layout::kPage;
         ++page)
      compare_page(r, *file, page);
  } else {
    for (uint64_t page = begin / layout::kPage; page * layout::kPage < end; ++page)
      watch(*file, page);
    compare(r, *file, begin / kWord, end / kWord);
  }
  const size_t index = index_in(r, file);
  add_store(r, index, first);
  Event& event = add(r, Kind::kFlush, index);
  event.offset = begin;
  event.bytes = end - begin;
}

void point(const char* name) {
  if (!is_on()) return;
  Recorder& r = recorder();
  std::unique_lock lock(r.mutex);
  compare_all(r, true);
  const bool is_fence = std::strcmp(name, "fence") == 0;
  const uint32_t index = index_of(r, name);
  add(r, is_fence ? Kind::kFence : Kind::kPoint).name = index;
  for (const Delay& delay : r.delays) {
    if (std::strncmp(name, delay.point.c_str(), delay.point.size()) != 0) continue;
    const auto wait = std::chrono::microseconds(delay.microseconds);
    lock.unlock();
    std::this_thread::sleep_for(wait);
    return;
  }
}

namespace {

template <typename Which>  // a descriptor, or a mapped byte
void add_sync(Which which, Kind kind, uint64_t bytes) {
  if (!is_on()) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  const File* file = find(r, which);
  if (file == nullptr) return;
  const size_t index = index_in(r, file);
  compare_all(r, false);
  Event& event = add(r, kind, index);
  event.bytes = bytes;
  if constexpr (std::is_pointer_v<Which>)
    event.offset = static_cast<uint64_t>(static_cast<const std::byte*>(which) - file->base);
}

}  // namespace

void sync_begin(int fd) { add_sync(fd, Kind::kSyncBegin, 0); }

void sync_end(int fd) { add_sync(fd, Kind::kSyncEnd, 0); }

void sync_begin(const void* p, uint64_t bytes) { add_sync(p, Kind::kSyncBegin, bytes); }

void sync_end(const void* p) { add_sync(p, Kind::kSyncEnd, 0); }

void resized(int fd) {
  if (!is_on()) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  find(r, fd);  // notes the size
}

void folder(const std::string& path) {
  if (!is_on()) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  const uint32_t index = index_of(r, path);
  add(r, Kind::kFolder).name = index;
}

namespace {

// data: nullptr for zeros.
void put(int fd, uint64_t offset, const void* data, uint64_t bytes) {
  if (!is_on()) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  File* file = find(r, fd);
  if (file == nullptr) return;
  const uint64_t first = r.record.places.size();
  auto* shadow = reinterpret_cast<std::byte*>(file->shadow.data());
  const uint64_t begin = offset / kWord, end = (offset + bytes + kWord - 1) / kWord;
  const std::vector<uint64_t> before(file->shadow.begin() + static_cast<int64_t>(begin),
                                     file->shadow.begin() + static_cast<int64_t>(end));
  if (data != nullptr) {
    std::memcpy(shadow + offset, data, bytes);
  } else {
    std::memset(shadow + offset, 0, bytes);
  }
  for (uint64_t w = begin; w < end; ++w) {
    if (file->shadow[w] == before[w - begin]) continue;
    r.record.places.push_back(w);
    r.record.values.push_back(file->shadow[w]);
  }
  add_store(r, index_in(r, file), first);
}

}  // namespace

void written(int fd, uint64_t offset, const void* data, uint64_t bytes) {
  put(fd, offset, data, bytes);
}

void punched(int fd, uint64_t offset, uint64_t bytes) { put(fd, offset, nullptr, bytes); }

void mark(const std::string& text) {
  if (!is_on()) return;
  Recorder& r = recorder();
  const std::lock_guard lock(r.mutex);
  compare_all(r, false);
  const uint32_t index = index_of(r, text);
  add(r, Kind::kMark).name = index;
}

}  // namespace tcxl::recording
