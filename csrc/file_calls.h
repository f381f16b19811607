// System calls on a pool's files that must be continued where a signal interrupted them or only a
// part was done, and what follows from a failed sync.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tcxl {

// posix_fallocate of the file's [from, to). 0 or the errno.
int allocate(int fd, uint64_t from, uint64_t to);
// Exactly `bytes` bytes. 0 or the errno; EIO when the file ends before.
int read_exactly(int fd, void* to, uint64_t bytes, uint64_t offset);
// Has every page of a shared mapping written to the medium again, whether or not the kernel takes
// it for written. Only while no other thread stores there.
void write_again(std::byte* base, uint64_t bytes);
// What to say of a file's failed sync; its first line is the fact.
std::string sync_failed(int os_error, const std::string& path);

}  // namespace tcxl
