// The kernels for AVX2.
#include "kernels_internal.h"

#if defined(__AVX2__)
#define TCXL_LANES 8
#include "kernels_body.h"

const tcxl::internal::KernelTable* tcxl::internal::avx2_kernels() { return &kKernels; }
#else
const tcxl::internal::KernelTable* tcxl::internal::avx2_kernels() { return nullptr; }
#endif
