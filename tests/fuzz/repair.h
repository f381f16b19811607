// Puts the checksums right after bytes were changed, so that an input gets past them to what they
// guard. Follows the structures as they are now: where one points nowhere, the rest is left.
#pragma once

#include "image.h"

namespace tcxl::fuzz {

void repair(PoolImage& image);
// Whether opening for level power (or any level, read only) would believe one of the superblocks.
bool passes_superblock(const PoolImage& image, bool has_power, bool is_read_only);
// Whether a number that counts openings or batches is about to reach the largest that is believed:
// counting gets none there, and after the next recovery the pool is refused, as it should be.
bool is_counted_out(const PoolImage& image);

}  // namespace tcxl::fuzz
