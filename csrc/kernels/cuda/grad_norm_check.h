// How the binding calls the CUDA kernel of grad_norm_check. `total` is two doubles, `partials` room
// for so many as the function below says.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

int64_t partial_sums_of_grad_norm(int64_t n, int multiprocessors);

cudaError_t launch_grad_norm_check(const void* grad, Format format, int64_t n, double* partials,
                                   double* total, int multiprocessors, cudaStream_t stream);

}  // namespace ckptsurgeon
