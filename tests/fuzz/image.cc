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

FileImage::FileImage() : template_pages_(kPages), is_dirty_(kPages) {
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
  is_dirty_.assign(kPages, 0);
  dirty_.clear();
  forget_written();
  for (uint64_t page = 0; page < kPages; ++page) {
    const std::byte* from = buffer_ + page * kPage;
    template_pages_[page].reset();
    if (page * kPage >= bytes_ || is_zero(from, kPage)) continue;
    template_pages_[page] = std::make_unique<std::byte[]>(kPage);
    std::memcpy(template_pages_[page].get(), from, kPage);
  }
}

void FileImage::mark(uint64_t page) {
  if (is_dirty_[page]) return;
  is_dirty_[page] = 1;
  dirty_.push_back(page);
}

void FileImage::restore() {
  bytes_ = template_bytes_;
  exists_ = template_exists_;
  for (const uint64_t page : dirty_) {
    std::byte* to = buffer_ + page * kPage;
    if (template_pages_[page] == nullptr) {
      std::memset(to, 0, kPage);
    } else {
      std::memcpy(to, template_pages_[page].get(), kPage);
    }
    is_dirty_[page] = 0;
  }
  dirty_.clear();
}

void FileImage::resize(uint64_t bytes) {
  bytes = std::min(bytes, kSizeMax);
  exists_ = true;
  // What is cut off is zero should the file grow again; most of it is already.
  for (uint64_t page = bytes / kPage; page * kPage < template_bytes_; ++page) {
    if (template_pages_[page] != nullptr) mark(page);
  }
  for (const uint64_t page : dirty_) {
    const uint64_t from = std::max(bytes, page * kPage);
    if (from < (page + 1) * kPage) std::memset(buffer_ + from, 0, (page + 1) * kPage - from);
  }
  bytes_ = bytes;
}

const std::byte* FileImage::at(uint64_t offset, uint64_t count) const {
  const bool is_inside = offset <= std::min(bytes_, kBufferBytes) && count <= bytes_from(offset);
  return is_inside ? buffer_ + offset : nullptr;
}

std::byte* FileImage::edit(uint64_t offset, uint64_t count) {
  if (at(offset, count) == nullptr) return nullptr;
  for (uint64_t page = offset / kPage; page * kPage < offset + count; ++page) mark(page);
  return buffer_ + offset;
}

bool FileImage::is_as_built(uint64_t offset, uint64_t count) const {
  if (at(offset, count) == nullptr) return false;
  for (uint64_t page = offset / kPage; page * kPage < offset + count; ++page) {
    if (!is_dirty_[page]) continue;
    const uint64_t from = std::max(offset, page * kPage);
    const uint64_t bytes = std::min(offset + count, (page + 1) * kPage) - from;
    const std::byte* kept = template_pages_[page].get();
    if (kept == nullptr ? !is_zero(buffer_ + from, bytes)
                        : std::memcmp(buffer_ + from, kept + from % kPage, bytes) != 0)
      return false;
  }
  return true;
}

void FileImage::write_to(const std::string& path) {
  const bool is_known = is_written_known_ && exists_ && bytes_ == template_bytes_;
  is_written_known_ = exists_ && bytes_ == template_bytes_;
  if (!exists_) {
    ::unlink(path.c_str());
    return;
  }
  if (is_known && written_.empty() && dirty_.empty()) return;
  const int more = is_known ? 0 : O_CREAT | O_TRUNC;
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | more, 0600));
  TCXL_ASSERT(fd.is_open());
  TCXL_ASSERT(is_known || ::ftruncate(fd.get(), static_cast<off_t>(bytes_)) == 0);
  auto put = [&](uint64_t page) {
    if (page * kPage >= bytes_) return;
    const uint64_t count = std::min(kPage, bytes_ - page * kPage);
    const ssize_t n =
        ::pwrite(fd.get(), buffer_ + page * kPage, count, static_cast<off_t>(page * kPage));
    TCXL_ASSERT(n == static_cast<ssize_t>(count));
  };
  for (const uint64_t page : dirty_) put(page);
  if (is_known) {
    for (const uint64_t page : written_) {
      if (!is_dirty_[page]) put(page);
    }
  } else {
    for (uint64_t page = 0; page * kPage < bytes_ && page < kPages; ++page) {
      if (template_pages_[page] != nullptr && !is_dirty_[page]) put(page);
    }
  }
  written_ = dirty_;
}

void PoolImage::restore() {
  for (FileImage& file : files) file.restore();
}

void PoolImage::write_to(const std::string& folder) {
  for (size_t i = 0; i < kNumFiles; ++i) files[i].write_to(folder + "/" + kFileNames[i]);
}

void PoolImage::forget_written() {
  for (FileImage& file : files) file.forget_written();
}

}  // namespace tcxl::fuzz
