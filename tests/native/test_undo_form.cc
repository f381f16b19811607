// Which form the undo log takes by itself.
#include <chrono>
#include <thread>

#include "check.h"
#include "undo_form.h"

namespace {

using namespace tcxl;

constexpr uint64_t kRows = 100;
constexpr int kCommits = 48;  // three windows: the first only measures
constexpr uint64_t kWorkNs = 20'000, kStepUs = 200;

// Commits with a step of kStepUs around them, of which the engine has taken `busy_ns`.
void run(FormChoice& choice, uint64_t busy_ns, uint64_t work_ns = kWorkNs) {
  for (int i = 0; i < kCommits; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(kStepUs));
    choice.busy_ns() += busy_ns;
    choice.note_commit(kRows, choice.is_fused() ? 0 : work_ns);
  }
}

void test_a_long_step_with_an_idle_processor() {
  FormChoice choice(4);
  CHECK(!choice.is_fused());
  run(choice, 0);
  CHECK(!choice.is_fused());
  CHECK(choice.is_step_long());
}

void test_no_time_outside_the_engine() {
  FormChoice choice(4);
  run(choice, 1'000'000'000);
  CHECK(choice.is_fused());
  CHECK(!choice.is_step_long());
  run(choice, 0);
  CHECK(!choice.is_fused());  // and back
  CHECK(choice.is_step_long());
}

void test_no_idle_processor() {
  FormChoice choice(0);
  run(choice, 0);
  CHECK(choice.is_fused());
  CHECK(choice.is_step_long());
}

// The first windows say nothing while no work of the background is known.
void test_unknown_work() {
  FormChoice choice(0);
  run(choice, 1'000'000'000, 0);
  CHECK(!choice.is_fused());
}

}  // namespace

int main() {
  test_a_long_step_with_an_idle_processor();
  test_no_time_outside_the_engine();
  test_no_idle_processor();
  test_unknown_work();
  CHECK(count_cpus() > 0);
  return tcxl::test::check_result();
}
