// The pools that inputs change: each as a program that was killed, or a machine that lost power,
// leaves it. Made once by the classes that write real pools, then given a fixed uuid: the same
// bytes in every run.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fields.h"
#include "image.h"
#include "input.h"

namespace tcxl::fuzz {

struct Place {
  FileIndex file;
  uint64_t offset;
};

struct TemplatePool {
  PoolImage image;
  bool has_power = false;
  std::array<std::vector<Place>, kNumStructures> places;
  std::vector<Place>& at(Structure s) { return places[static_cast<size_t>(s)]; }
  const std::vector<Place>& at(Structure s) const { return places[static_cast<size_t>(s)]; }
};

// Builds the pool with the number in kPoolNames, in an empty folder that it may use.
void build_pool(size_t number, const std::string& folder, TemplatePool& pool);

}  // namespace tcxl::fuzz
