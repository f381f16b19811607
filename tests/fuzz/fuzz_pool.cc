// The fuzzer's entry points (libFuzzer). Counts what it did in the file that
// TRAININGCXL_FUZZ_COUNTS names: a process that ends with a finding leaves its counts, too.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "errors.h"
#include "fields.h"
#include "harness.h"
#include "kernels.h"
#include "media.h"

namespace {

using namespace tcxl::fuzz;

struct Counts {
  uint64_t executions, past_superblock, open;
};

Counts* counts() {
  static Counts nowhere{};
  const char* path = std::getenv("TRAININGCXL_FUZZ_COUNTS");
  if (path == nullptr) return &nowhere;
  const tcxl::Fd fd(::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  TCXL_ASSERT(fd.is_open() && ::ftruncate(fd.get(), sizeof(Counts)) == 0);
  void* p = ::mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  TCXL_ASSERT(p != MAP_FAILED);
  return static_cast<Counts*>(p);
}

Harness& harness() {
  static Harness the_harness;
  return the_harness;
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  void change(Input& input) {
    auto& all = input.operations;
    switch (below(8)) {
      case 0:
        input.pool = static_cast<uint8_t>(below(kNumPools));
        break;
      case 1:
        input.mode = static_cast<OpenMode>(below(kNumOpenModes));
        break;
      case 2:
        input.is_reboot = below(4) != 0;
        input.is_broken = below(8) == 0;
        break;
      case 3:
        if (!all.empty()) all.erase(all.begin() + static_cast<int64_t>(below(all.size())));
        break;
      case 4:
        if (!all.empty()) all[below(all.size())] = operation();
        break;
      case 5:
        if (!all.empty()) change_operation(all[below(all.size())]);
        break;
      default:
        if (all.size() < kOperationsMax)
          all.insert(all.begin() + static_cast<int64_t>(below(all.size() + 1)), operation());
    }
  }

 private:
  uint64_t below(uint64_t n) { return random_() % n; }

  uint64_t value() {
    constexpr uint64_t kShifts = 64;
    const uint64_t power = 1ull << below(kShifts);
    switch (below(6)) {
      case 0:
        return below(16);
      case 1:
        return power;
      case 2:
        return power - 1 - below(2);
      case 3:
        return 0 - power;
      case 4:
        return below(4096) * 64;  // lines and pages
      default:
        return random_();
    }
  }

  // Where something lies: the head, the regions and the ring begin at multiples of these.
  uint32_t offset() {
    constexpr uint64_t kUnits[] = {8, 64, 4096, 65536, 2 << 20};
    const uint64_t unit = kUnits[below(5)];
    return static_cast<uint32_t>(below((12 << 20) / unit) * unit +
                                 (below(2) != 0 ? below(32) * 8 : 0));
  }

  Operation operation() {
    Operation o;
    o.is_late = below(8) == 0;
    o.index = static_cast<uint8_t>(below(below(2) != 0 ? 2 : 24));
    o.value = value();
    o.offset = offset();
    const uint64_t choice = below(32);
    o.action = choice < 24   ? static_cast<Action>(below(3))
               : choice < 27 ? Action::kWrite
               : choice < 30 ? Action::kCopy
               : choice < 31 ? Action::kSize
                             : Action::kRemove;
    o.target = static_cast<uint8_t>(below(fields().size()));
    if (o.action == Action::kWrite)
      o.target %= kNumFiles, o.count = 1 + static_cast<uint32_t>(below(600));
    if (o.action == Action::kSize || o.action == Action::kRemove) o.target %= kNumFiles;
    if (o.action == Action::kCopy) {
      o.target %= kNumFiles * kNumFiles;
      o.value = (64ull << below(11)) << 32 | offset();
    }
    return o;
  }

  void change_operation(Operation& o) {
    switch (below(4)) {
      case 0:
        o.value = below(2) == 0 ? value() : o.value + below(16) - 8;
        break;
      case 1:
        o.index = static_cast<uint8_t>(below(24));
        break;
      case 2:
        o.is_late = !o.is_late;
        break;
      default:
        o.offset = below(2) == 0 ? offset() : o.offset + 8 * static_cast<uint32_t>(below(16)) - 64;
    }
  }

  std::mt19937_64 random_;
};

size_t store(const Input& input, uint8_t* data, size_t max_size) {
  const std::vector<uint8_t> bytes = encode(input);
  const size_t size = std::min(bytes.size(), max_size);
  std::copy_n(bytes.data(), size, data);
  return size;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  tcxl::use_isa(tcxl::Isa::kScalar);  // the only ones built with the sanitizers
  harness().build_all();              // no part of the first execution's time
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Counts* const total = counts();
  const Outcome outcome = harness().run(decode({data, size}));
  ++total->executions;
  total->past_superblock += outcome.is_past_superblock ? 1 : 0;
  total->open += outcome.is_open ? 1 : 0;
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  Input input = decode({data, size});
  Mutator mutator(seed);
  for (unsigned i = 0; i <= seed % 4; ++i) mutator.change(input);
  return store(input, data, max_size);
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* data1, size_t size1,
                                            const uint8_t* data2, size_t size2, uint8_t* out,
                                            size_t max_size, unsigned seed) {
  Input input = decode({data1, size1});
  const Input other = decode({data2, size2});
  for (const Operation& o : other.operations) {
    if (input.operations.size() < kOperationsMax && (seed = seed * 1103515245u + 12345u) >> 31)
      input.operations.push_back(o);
  }
  return store(input, out, max_size);
}
