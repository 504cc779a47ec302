// How the binding calls the CUDA kernel of grad_norm_check. `total` is two zeroed doubles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

cudaError_t launch_grad_norm_check(const void* grad, Format format, int64_t n, double* total,
                                   int multiprocessors, cudaStream_t stream);

}  // namespace ckptsurgeon
