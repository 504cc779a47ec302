// How the binding calls the CUDA kernel of adamw_flat_. `out` may be null; `stats` is six
// doubles, `partials` room for so many as the function below says; `grad_mul` lies on the device, so
// that nobody waits for the gradient norm.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../adamw_hyper.h"
#include "format.h"

namespace ckptsurgeon {

int64_t partial_sums_of_adamw(int64_t n, int multiprocessors);

cudaError_t launch_adamw_flat(float* p, float* m, float* v, const void* g, Format g_format,
                              void* out, Format out_format, int64_t n, const float* grad_mul,
                              Hyper hyper, double* partials, double* stats,
                              int multiprocessors, cudaStream_t stream);

}  // namespace ckptsurgeon
