// The kernels for the baseline of the platform (SSE2 on x86-64, NEON on arm64).
#define TCXL_LANES 4
#include "kernels_body.h"

const tcxl::internal::KernelTable* tcxl::internal::scalar_kernels() { return &kKernels; }
