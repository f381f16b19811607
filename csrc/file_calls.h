// System calls on a pool's files, continued where a signal interrupted them or only a part was
// done. An error of a sync is final and never tried again: the kernel may have dropped what it
// could not write, and would report success for what is left.
#pragma once

#include <cstdint>

namespace tcxl {

// Each returns 0 or the errno.
int sync_data(int fd);                             // fdatasync
int sync_mapped(const void* p, uint64_t bytes);    // msync of the pages that hold [p, p + bytes)
int allocate(int fd, uint64_t from, uint64_t to);  // posix_fallocate of the file's [from, to)
// Exactly `bytes` bytes; EIO when the file ends before.
int read_exactly(int fd, void* to, uint64_t bytes, uint64_t offset);

}  // namespace tcxl
