// What one execution does, as bytes for the fuzzer (a head of 4 bytes, then operations of 16) and
// as text for people and the repository:
//
//   pool power                       template: process, fused, power, wrapped, new, new-power
//   open exact                       exact, latest, read-exact, read-latest, verify, inspect
//   reboot                           as if the machine had restarted
//   broken                           checksums stay as the changes leave them
//   set frame 2 bytes 0x1000         field of the structure with that number; also add, xor
//   write log 4096 0x0 512           8 bytes, at a byte of a file, so many times
//   copy log 4194304 to log 65536 512
//   size data 4096                   truncates or extends
//   remove journal
//   late set slot 0 crc 0            after the checksums were put right
//   expect corrupted                 what must happen; not part of the bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tcxl::fuzz {

enum class OpenMode : uint8_t { kExact, kLatest, kReadExact, kReadLatest, kVerify, kInspect };
inline constexpr size_t kNumOpenModes = 6;

enum class Action : uint8_t { kSet, kAdd, kXor, kWrite, kCopy, kSize, kRemove };
inline constexpr size_t kNumActions = 7;

struct Operation {
  Action action = Action::kSet;
  bool is_late = false;
  uint8_t target = 0;   // field; file; of kCopy: from + 3 * to
  uint8_t index = 0;    // of the structure
  uint32_t offset = 0;  // in the file
  uint64_t value = 0;   // of kCopy: to offset in the lower half, bytes in the upper
  uint32_t count = 1;   // of kWrite
};

struct Input {
  uint8_t pool = 0;
  OpenMode mode = OpenMode::kExact;
  bool is_reboot = false, is_broken = false;
  std::vector<Operation> operations;
};

inline constexpr size_t kHeadBytesOfInput = 4, kOperationBytes = 16, kOperationsMax = 64;
inline constexpr const char* kPoolNames[] = {"process", "fused", "power",
                                             "wrapped", "new",   "new-power"};
inline constexpr size_t kNumPools = 6;

Input decode(std::span<const uint8_t> bytes);  // any bytes mean something
std::vector<uint8_t> encode(const Input& input);
std::string print(const Input& input);
// Text to input; `expected` takes the word behind "expect". Throws std::runtime_error that names
// the line.
Input parse(const std::string& text, std::string& expected);

}  // namespace tcxl::fuzz
