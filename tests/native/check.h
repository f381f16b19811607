// Assertions for the native tests. A failed check is printed and counted and the test goes on; main
// returns check_result(). Thread-safe.
#pragma once

#include <atomic>
#include <cstdio>
#include <sstream>
#include <string>

namespace tcxl::test {

inline std::atomic<int> failures{0};
inline std::atomic<long> checks{0};

inline bool report(bool ok, const char* file, int line, const char* what,
                   const std::string& detail) {
  ++checks;
  if (ok) return true;
  constexpr int kShown = 20;
  if (failures++ < kShown)
    std::fprintf(stderr, "%s:%d: failed: %s %s\n", file, line, what, detail.c_str());
  return false;
}

template <typename A, typename B>
bool report_equal(const A& a, const B& b, const char* file, int line, const char* what) {
  if (a == b) return report(true, file, line, what, "");
  std::ostringstream detail;
  detail << "(" << a << " against " << b << ")";
  return report(false, file, line, what, detail.str());
}

inline int check_result() {
  std::printf("%ld checks, %d failed\n", checks.load(), failures.load());
  return failures.load() == 0 && checks.load() > 0 ? 0 : 1;
}

}  // namespace tcxl::test

// Both give true when the check holds, so that a test can stop at the first difference.
#define CHECK(condition) \
  ::tcxl::test::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition, "")
#define CHECK_EQUAL(a, b) ::tcxl::test::report_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
// Like CHECK, with a text (std::string) that says which case failed.
#define CHECK_CASE(condition, text) \
  ::tcxl::test::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition, (text))
#define CHECK_THROWS(expression, type)                                                  \
  do {                                                                                  \
    bool thrown = false;                                                                \
    try {                                                                               \
      (void)(expression);                                                               \
    } catch (const type&) {                                                             \
      thrown = true;                                                                    \
    }                                                                                   \
    ::tcxl::test::report(thrown, __FILE__, __LINE__, #expression " throws " #type, ""); \
  } while (false)
