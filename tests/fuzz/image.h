// The files of a pool in memory: a template, what an input changed of it, and the way to disk.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"

namespace tcxl::fuzz {

enum FileIndex : size_t { kLog = 0, kData = 1, kJournal = 2, kNumFiles = 3 };
inline constexpr std::array<const char*, kNumFiles> kFileNames = {"log", "data", "journal"};

// One file. Bytes behind kBufferBytes are zero and cannot be edited; they exist for sizes only.
class FileImage {
 public:
  static constexpr uint64_t kBufferBytes = 16ull << 20;
  static constexpr uint64_t kSizeMax = 64ull << 20;

  FileImage();
  ~FileImage();
  FileImage(const FileImage&) = delete;
  FileImage& operator=(const FileImage&) = delete;

  void load(const std::string& path);  // becomes the template; missing: no file
  void keep();                         // what it is now becomes the template
  void restore();                      // back to the template

  uint64_t bytes() const { return bytes_; }
  bool exists() const { return exists_; }
  void resize(uint64_t bytes);
  void remove() { exists_ = false; }
  // Bytes to read; nullptr when any of them lies outside.
  const std::byte* at(uint64_t offset, uint64_t count) const;
  // How many there are to read from there on.
  uint64_t bytes_from(uint64_t offset) const {
    const uint64_t end = std::min(bytes_, kBufferBytes);
    return end - std::min(end, offset);
  }
  // Bytes to change.
  std::byte* edit(uint64_t offset, uint64_t count);
  uint64_t offset_of(const void* p) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(p) - buffer_);
  }
  // Whether they lie inside and are those of the template.
  bool is_as_built(uint64_t offset, uint64_t count) const;
  // Writes what differs from the last time, all of it after forget_written(): who may have changed
  // the file since then says so.
  void write_to(const std::string& path);
  void forget_written() { is_written_known_ = false; }

 private:
  static constexpr uint64_t kPages = kBufferBytes / layout::kPage;

  void mark(uint64_t page);
  std::byte* buffer_ = nullptr;
  uint64_t bytes_ = 0, template_bytes_ = 0;
  bool exists_ = false, template_exists_ = false;
  std::vector<std::unique_ptr<std::byte[]>> template_pages_;  // nullptr: zero
  std::vector<uint64_t> dirty_, written_;  // pages that may differ: in memory, in the file
  std::vector<char> is_dirty_;
  bool is_written_known_ = false;  // the file has the template's size and is it but for these
};

struct PoolImage {
  std::array<FileImage, kNumFiles> files;

  template <typename T>
  const T* read(FileIndex file, uint64_t offset, uint64_t count = 1) const {
    if (offset % alignof(T) != 0 || count > FileImage::kBufferBytes) return nullptr;
    return reinterpret_cast<const T*>(files[file].at(offset, count * sizeof(T)));
  }
  template <typename T>
  T* edit(FileIndex file, uint64_t offset, uint64_t count = 1) {
    if (offset % alignof(T) != 0 || count > FileImage::kBufferBytes) return nullptr;
    return reinterpret_cast<T*>(files[file].edit(offset, count * sizeof(T)));
  }
  // Changes one value of the file; pages where nothing changes stay as built.
  template <typename T>
  void put(FileIndex file, const T& at, T value) {
    if (at != value) *edit<T>(file, files[file].offset_of(&at)) = value;
  }
  void restore();
  void write_to(const std::string& folder);
  void forget_written();
};

}  // namespace tcxl::fuzz
