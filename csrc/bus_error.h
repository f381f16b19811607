// A last word before SIGBUS ends the process: which pool's file could not give a page. Mapped
// memory is not there when somebody cut the file, when the disk cannot be read, or when a memory
// module is bad; the access itself cannot be helped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tcxl {

// From now on a bus error in [base, base + bytes), which maps `path` from `file_offset` on, is
// explained on standard error; then, as for any other, whatever handled SIGBUS before does so: by
// default it ends the process. Called again for the same base when the mapping has grown.
void explain_bus_errors(const std::byte* base, uint64_t bytes, uint64_t file_offset,
                        const std::string& path);
void forget_bus_errors(const std::byte* base);

}  // namespace tcxl
