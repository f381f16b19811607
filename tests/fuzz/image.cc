#include "image.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "errors.h"
#include "media.h"

namespace tcxl::fuzz {

using layout::kPage;

FileImage::FileImage() {
  void* p = ::mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TCXL_ASSERT(p != MAP_FAILED);
  buffer_ = static_cast<std::byte*>(p);
}

FileImage::~FileImage() { ::munmap(buffer_, kBufferBytes); }

void FileImage::load(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  exists_ = fd.is_open();
  bytes_ = exists_ ? file_bytes(fd.get()) : 0;
  TCXL_ASSERT(bytes_ <= kBufferBytes);
  TCXL_ASSERT(!exists_ || ::pread(fd.get(), buffer_, bytes_, 0) == static_cast<ssize_t>(bytes_));
  keep();
}

void FileImage::keep() {
  template_bytes_ = bytes_;
  template_exists_ = exists_;
  template_pages_.clear();
  dirty_.clear();
  for (uint64_t page = 0; page * kPage < bytes_; ++page) {
    const std::byte* from = buffer_ + page * kPage;
    if (!is_zero(from, kPage)) template_pages_[page].assign(from, from + kPage);
  }
}

void FileImage::restore() {
  bytes_ = template_bytes_;
  exists_ = template_exists_;
  for (const uint64_t page : dirty_) {
    std::byte* to = buffer_ + page * kPage;
    const auto kept = template_pages_.find(page);
    if (kept == template_pages_.end()) {
      std::memset(to, 0, kPage);
    } else {
      std::memcpy(to, kept->second.data(), kPage);
    }
  }
  dirty_.clear();
}

void FileImage::resize(uint64_t bytes) {
  bytes = std::min(bytes, kSizeMax);
  exists_ = true;
  // What is cut off is zero should the file grow again; most of it is already.
  for (const auto& [page, kept] : template_pages_) {
    if ((page + 1) * kPage > bytes) dirty_.insert(page);
  }
  for (const uint64_t page : dirty_) {
    const uint64_t from = std::max(bytes, page * kPage);
    if (from < (page + 1) * kPage) std::memset(buffer_ + from, 0, (page + 1) * kPage - from);
  }
  bytes_ = bytes;
}

const std::byte* FileImage::at(uint64_t offset, uint64_t count) const {
  const uint64_t end = std::min(bytes_, kBufferBytes);
  return offset <= end && count <= end - offset ? buffer_ + offset : nullptr;
}

std::byte* FileImage::edit(uint64_t offset, uint64_t count) {
  if (at(offset, count) == nullptr) return nullptr;
  for (uint64_t page = offset / kPage; page * kPage < offset + count; ++page) dirty_.insert(page);
  return buffer_ + offset;
}

void FileImage::write_to(const std::string& path) const {
  if (!exists_) {
    ::unlink(path.c_str());
    return;
  }
  const Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  TCXL_ASSERT(fd.is_open() && ::ftruncate(fd.get(), static_cast<off_t>(bytes_)) == 0);
  auto put = [&](uint64_t page) {
    if (page * kPage >= bytes_) return;
    const uint64_t count = std::min(kPage, bytes_ - page * kPage);
    const ssize_t n =
        ::pwrite(fd.get(), buffer_ + page * kPage, count, static_cast<off_t>(page * kPage));
    TCXL_ASSERT(n == static_cast<ssize_t>(count));
  };
  for (const auto& [page, kept] : template_pages_) put(page);
  for (const uint64_t page : dirty_) {
    if (!template_pages_.contains(page)) put(page);
  }
}

void PoolImage::restore() {
  for (FileImage& file : files) file.restore();
}

void PoolImage::write_to(const std::string& folder) const {
  for (size_t i = 0; i < kNumFiles; ++i) files[i].write_to(folder + "/" + kFileNames[i]);
}

}  // namespace tcxl::fuzz
