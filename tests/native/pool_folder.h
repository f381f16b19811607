// A pool of its own for each native test, on tmpfs where there is one, removed at the end.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "store.h"

namespace tcxl::test {

class PoolFolder {
 public:
  PoolFolder() {
    const char* root = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    std::string name = std::string(root) + "/trainingcxl-native-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    root_ = name;
  }
  ~PoolFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  PoolFolder(const PoolFolder&) = delete;
  PoolFolder& operator=(const PoolFolder&) = delete;

  OpenOptions options() const {
    OpenOptions o;
    o.path = root_ + "/test.pool";
    return o;
  }
  std::string file(const std::string& name) const { return root_ + "/test.pool/" + name; }

  // Overwrites bytes of a closed pool.
  void patch(const std::string& name, uint64_t offset, const void* data, size_t bytes) const {
    std::fstream f(file(name), std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(static_cast<std::streamoff>(offset));
    f.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  }

 private:
  std::string root_;
};

inline layout::TableRecord table_record(const std::string& name, uint64_t rows, uint32_t dim,
                                        OptimizerKind optimizer) {
  layout::TableRecord r{};
  std::memcpy(r.name, name.data(), name.size());
  r.rows = rows;
  r.dim = dim;
  r.optimizer = static_cast<uint32_t>(optimizer);
  return r;
}

}  // namespace tcxl::test
