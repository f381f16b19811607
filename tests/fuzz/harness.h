// Runs one input: a pool's files are made, changed and opened. Any Error is fine; everything else
// that goes wrong ends the process.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "input.h"
#include "pools.h"

namespace tcxl::fuzz {

struct Outcome {
  bool is_past_superblock = false;
  bool is_open = false;  // recovered, or verified, or inspected, without an error
  std::string result;    // "opens", or the kind of the error
  std::string message;   // of the error; of verify: its findings
};

class Harness {
 public:
  Harness();   // a private folder, on tmpfs where there is one
  ~Harness();  // removes it
  Harness(const Harness&) = delete;
  Harness& operator=(const Harness&) = delete;

  void build_all();  // else each pool is made when an input first needs it
  Outcome run(const Input& input);

 private:
  TemplatePool& pool(size_t number);
  // One each: most files stay as they are from one input to the next.
  std::string folder_of(size_t number) const;
  std::string root_;
  std::array<std::unique_ptr<TemplatePool>, kNumPools> pools_;
};

}  // namespace tcxl::fuzz
