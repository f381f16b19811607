// Times of the kernels alone, one thread, on the shapes of docs/design.md. No pool, no file:
// anonymous memory. 'make test-native' builds it:
//   build/native/kernels_bench [i|ii|iii16|iii128] [uniform|zipf] [sgd|row-wise] [rounds] [2M|4K]
// Prints the median and the least CPU time of each kernel: on a shared machine wall time mostly
// shows the neighbours.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "crc32c.h"
#include "kernels.h"
#include "layout.h"
#include "media.h"

namespace {

using namespace tcxl;

struct Shape {
  std::vector<uint64_t> rows;
  int64_t dim, lookups_per_bag, bags;
};

Shape shape_of(const std::string& name) {
  if (name == "i") return {std::vector<uint64_t>(8, 1000000), 32, 80, 2048};
  if (name == "ii") return {std::vector<uint64_t>(32, 250000), 64, 120, 128};
  // Rows of the 26 Criteo columns, capped at a million.
  const std::vector<uint64_t> criteo{
      1460,  583,     1000000, 1000000, 305,  24, 12517,   633, 3,  93145,  5683, 1000000, 3194, 27,
      14992, 1000000, 10,      5652,    2173, 4,  1000000, 18,  15, 286181, 105,  142572};
  return {criteo, name == "iii16" ? 16 : 128, 1, 2048};
}

double cpu_milliseconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

uint64_t next_random() {
  static uint64_t x = 88172645463325252u;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x * 0x2545f4914f6cdd1du;
}

bool huge_pages = true;

template <typename T>
T* allocate(uint64_t count) {
  constexpr uint64_t kHuge = uint64_t{2} << 20;
  const uint64_t bytes = (count * sizeof(T) + kHuge) / kHuge * kHuge;
  void* p = std::aligned_alloc(kHuge, bytes);
  if (p == nullptr) std::abort();
  madvise(p, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::fill_n(static_cast<char*>(p), bytes, char{0});
  return static_cast<T*>(p);
}

// Row numbers with exponent 1, spread over the table by a multiplication with an odd number.
int64_t zipf_row(const std::vector<double>& cumulative, uint64_t rows) {
  const double u = static_cast<double>(next_random() >> 11) * 0x1p-53;
  const auto rank = std::lower_bound(cumulative.begin(), cumulative.end(), u) - cumulative.begin();
  return static_cast<int64_t>(static_cast<uint64_t>(rank) * 2654435761u % rows);
}

std::vector<double> zipf_distribution(uint64_t rows) {
  std::vector<double> cumulative;
  double sum = 0;
  for (uint64_t k = 1; k <= rows; ++k) cumulative.push_back(sum += 1.0 / static_cast<double>(k));
  for (double& x : cumulative) x /= sum;
  return cumulative;
}

struct Batch {
  std::vector<std::vector<int64_t>> ids;  // of each table
  std::vector<TableLookups> lookups;
};

std::map<std::string, std::vector<double>> times;

void timed(const std::string& name, const std::function<void()>& work) {
  const double start = cpu_milliseconds();
  work();
  times[name].push_back(cpu_milliseconds() - start);
}

void print_times(uint64_t lookups, uint64_t rows) {
  std::printf("%-28s %10s %10s %10s %12s\n", "", "median ms", "least ms", "ns/row", "ns/lookup");
  for (auto& [name, t] : times) {
    std::sort(t.begin(), t.end());
    const double median = t[t.size() / 2];
    std::printf("%-28s %10.3f %10.3f %10.1f %12.1f\n", name.c_str(), median, t[0],
                median * 1e6 / static_cast<double>(rows),
                median * 1e6 / static_cast<double>(lookups));
  }
}

void print_crc_rates() {
  std::vector<char> bytes(1 << 20, 'x');
  uint32_t crc = 0;
  for (const size_t size : {72u, 136u, 264u, 520u, 1032u, 1u << 20}) {
    const size_t repeats = (size_t{64} << 20) / size;
    const double start = cpu_milliseconds();
    for (size_t k = 0; k < repeats; ++k) crc = crc32c(crc, bytes.data(), size);
    const double ns = (cpu_milliseconds() - start) * 1e6 / static_cast<double>(repeats);
    std::printf("crc32c of %7zu bytes: %9.1f ns, %5.1f GB/s\n", size, ns,
                static_cast<double>(size) / ns);
  }
  if (crc == 1) std::puts("");  // keeps the loop
}

class Bench {
 public:
  Bench(const Shape& shape, bool zipf, bool row_wise);
  void round(int number);
  void print() const {
    std::printf("%lu lookups, %lu rows, %lu of them also in the next batch\n", num_lookups_, rows_,
                shared_);
    print_times(num_lookups_, rows_);
  }

 private:
  void add_table(uint64_t rows, bool zipf, bool row_wise);
  FeatureBags bags(const Batch& batch, size_t t) const {
    return {batch.ids[t].data(), offsets_.data(), nullptr, Pooling::kSum,
            static_cast<int64_t>(t) * shape_.dim};
  }
  void build(Batch& batch) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const FeatureBags one = bags(batch, t);
      batch.lookups[t].build(&one, 1, shape_.bags, stride_, shape_.rows[t]);
    }
  }
  enum class Log { kNone, kHandOff, kFused };
  void update(const Batch& batch, Log log) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      UpdateJob job;
      job.table = tables_[t];
      job.lookups = &batch.lookups[t];
      job.grad = grad_;
      job.learning_rate = 0.01f;
      job.eps = 1e-8f;
      job.fence = &Persistence::fence;
      if (log == Log::kHandOff) job.next_record = next_record_[t].data();
      job.next_log = job.own_log = logs_[t];
      if (log == Log::kFused) {
        job.log_block_rows = layout::fused_block_rows(static_cast<uint64_t>(shape_.dim));
      }
      update_rows(job, 0, job.lookups->num_rows());
    }
  }

  Shape shape_;
  int64_t stride_;
  uint64_t num_lookups_;
  std::vector<TableView> tables_;
  std::vector<RecordColumns> logs_;
  std::vector<Batch> batches_{3};
  std::vector<std::vector<uint32_t>> next_record_;
  std::vector<int64_t> offsets_;
  std::map<uint64_t, std::vector<double>> distributions_;
  float *out_, *grad_;
  uint64_t rows_ = 0, shared_ = 0;
};

Bench::Bench(const Shape& shape, bool zipf, bool row_wise)
    : shape_(shape),
      stride_(static_cast<int64_t>(shape.rows.size()) * shape.dim),
      num_lookups_(shape.rows.size() * static_cast<uint64_t>(shape.bags * shape.lookups_per_bag)),
      next_record_(shape.rows.size()),
      out_(allocate<float>(static_cast<uint64_t>(shape.bags * stride_))),
      grad_(allocate<float>(static_cast<uint64_t>(shape.bags * stride_))) {
  for (Batch& batch : batches_) {
    batch.ids.resize(shape.rows.size());
    batch.lookups.resize(shape.rows.size());
  }
  for (const uint64_t rows : shape.rows) add_table(rows, zipf, row_wise);
  for (int64_t b = 0; b <= shape.bags; ++b) offsets_.push_back(b * shape.lookups_per_bag);
  for (int64_t k = 0; k < shape.bags * stride_; ++k) {
    grad_[k] = static_cast<float>(next_random() >> 40) * 0x1p-24f - 0.5f;
  }
}

void Bench::add_table(uint64_t rows, bool zipf, bool row_wise) {
  const size_t t = tables_.size();
  const auto dim = static_cast<uint64_t>(shape_.dim);
  const uint64_t lookups = num_lookups_ / shape_.rows.size(), records = std::min(rows, lookups);
  tables_.push_back({allocate<float>(rows * dim), row_wise ? allocate<float>(rows) : nullptr, rows,
                     shape_.dim, row_wise ? OptimizerKind::kRowWiseAdagrad : OptimizerKind::kSgd});
  initialize_rows(tables_[t].weight, shape_.dim, 0, rows, 1, t, 0.1f);
  logs_.push_back({allocate<uint64_t>(records), allocate<uint32_t>(records),
                   allocate<float>(records), allocate<float>(records * dim),
                   allocate<uint64_t>(records), 7});
  std::vector<double>& distribution = distributions_[rows];
  if (zipf && distribution.empty()) distribution = zipf_distribution(rows);
  for (Batch& batch : batches_) {
    for (uint64_t k = 0; k < lookups; ++k) {
      batch.ids[t].push_back(zipf ? zipf_row(distribution, rows)
                                  : static_cast<int64_t>(next_random() % rows));
    }
  }
}

void Bench::round(int number) {
  Batch& batch = batches_[static_cast<size_t>(number) % 3];
  Batch& next = batches_[static_cast<size_t>(number + 1) % 3];
  timed("lookup", [&] {
    for (size_t t = 0; t < tables_.size(); ++t) {
      lookup(tables_[t], bags(batch, t), 0, shape_.bags, out_, stride_);
    }
  });
  timed("sort", [&] { build(batch); });
  timed("update", [&] { update(batch, Log::kNone); });
  timed("update and own log", [&] { update(batch, Log::kFused); });
  build(next);
  timed("match rows", [&] {
    for (size_t t = 0; t < tables_.size(); ++t) {
      match_rows(batch.lookups[t].rows, next.lookups[t].rows, next_record_[t]);
    }
  });
  timed("update and hand-off", [&] { update(batch, Log::kHandOff); });
  timed("copy all rows to the log", [&] {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const std::vector<uint64_t>& rows = batch.lookups[t].rows;
      copy_rows_to_log(tables_[t], rows.data(), nullptr, rows.size(), logs_[t], nullptr);
    }
  });
  rows_ = shared_ = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    rows_ += batch.lookups[t].num_rows();
    for (const uint32_t record : next_record_[t]) shared_ += record != kNoRecord;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "i";
  const bool zipf = argc > 2 && std::string(argv[2]) == "zipf";
  const bool row_wise = argc > 3 && std::string(argv[3]) == "row-wise";
  const int rounds = argc > 4 ? std::atoi(argv[4]) : 9;
  huge_pages = argc <= 5 || std::string(argv[5]) != "4K";
  Bench bench(shape_of(name), zipf, row_wise);
  const FloatMode mode;
  for (int k = 0; k <= rounds; ++k) {
    if (k == 1) times.clear();  // the first round warms up
    bench.round(k);
  }
  std::printf("shape %s, %s, %s, %s pages, %s\n", name.c_str(), zipf ? "zipf" : "uniform",
              row_wise ? "row-wise Adagrad" : "SGD", huge_pages ? "2M" : "4K",
              isa_name(current_isa()));
  bench.print();
  print_crc_rates();
}
