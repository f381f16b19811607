// One writer a pool: flock on `lock` in the pool's folder. Forked children drop it at once, so that
// a data-loader worker never keeps a killed trainer's pool locked.
#pragma once

#include <string>

#include "media.h"

namespace tcxl {

// kLocked with the owner's pid when another process, or another Store of this one, has it.
Fd lock_pool(const std::string& folder, bool exclusive);
// Says who locks: writes our pid into the lock file.
void sign_lock(const Fd& fd);
// The child of a fork closes every descriptor that was handed to this.
void close_in_children(int fd);
void forget_in_children(int fd);

}  // namespace tcxl
