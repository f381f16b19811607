// CRC-32C (Castagnoli), the checksum of every persistent structure (docs/format.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tcxl {

// Continues `crc` (0 to start) over `size` bytes. crc32c(0, "123456789", 9) == 0xe3069283.
// Uses SSE4.2 where the CPU has it and a table elsewhere; both give the same value.
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// The table form, for tests and for CPUs without the instruction.
uint32_t crc32c_table(uint32_t crc, const void* data, size_t size);

}  // namespace tcxl
