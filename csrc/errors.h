// Errors that reach the user. The message says what, where and what to do; the kind chooses the
// Python class (src/trainingcxl/errors.py). An assertion (TCXL_ASSERT) is our bug, an Error is the
// world's fault.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

namespace tcxl {

enum class ErrorKind {
  kPool,
  kLocked,
  kCorrupted,
  kFull,
  kVersion,
  kDurability,
  kRecovery,
  kIndex,
  kValue,
  kOs
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind error_kind, const std::string& message, int error_number = 0)
      : std::runtime_error(message), kind(error_kind), os_error(error_number) {}
  ErrorKind kind;
  int os_error;  // errno when kind is kOs, else 0
};

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, text(parts...));
}

// What a user may do about a damaged pool; both follow "\n  do:    ".
inline std::string repair_advice(const std::string& pool) {
  return text("'trainingcxl repair ", pool,
              "' says what can still be reached, and goes there; 'trainingcxl verify ", pool,
              "' lists all damage");
}
// One file of another time beside the others goes unnoticed: nothing in `data` says when it is
// from.
inline constexpr const char* kRestoreAll = "restore all files of the pool from one copy";

inline std::string copy_advice(const std::string& pool) {
  return text("restore the pool from a copy or a snapshot; 'trainingcxl verify ", pool,
              "' lists all damage");
}

}  // namespace tcxl

// Stays on in release builds: a broken invariant must stop before it reaches the user's bytes.
#define TCXL_ASSERT(condition)                                                                 \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      std::fprintf(stderr, "trainingcxl: invariant broken: %s, %s:%d\n", #condition, __FILE__, \
                   __LINE__);                                                                  \
      std::abort();                                                                            \
    }                                                                                          \
  } while (false)
