// The files of a pool in memory: a template, what an input changed of it, and the way to disk.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
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
  // Bytes to change.
  std::byte* edit(uint64_t offset, uint64_t count);
  void write_to(const std::string& path) const;

 private:
  std::byte* buffer_ = nullptr;
  uint64_t bytes_ = 0, template_bytes_ = 0;
  bool exists_ = false, template_exists_ = false;
  std::map<uint64_t, std::vector<std::byte>> template_pages_;  // those that are not zero
  std::set<uint64_t> dirty_;                                   // pages that may differ from them
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
  void restore();
  void write_to(const std::string& folder) const;
};

}  // namespace tcxl::fuzz
