// The kernels for AVX-512.
#include "kernels_internal.h"

#if defined(__AVX512F__)
#define TCXL_LANES 16
#include "kernels_body.h"

const tcxl::internal::KernelTable* tcxl::internal::avx512_kernels() { return &kKernels; }
#else
const tcxl::internal::KernelTable* tcxl::internal::avx512_kernels() { return nullptr; }
#endif
