// How the binding calls the CUDA kernels of bias_gelu. `sums` are zeroed, one per column.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

cudaError_t launch_bias_gelu(const void* x, const void* bias, void* y, Format format, int64_t rows,
                             int64_t columns, int multiprocessors, cudaStream_t stream);

cudaError_t launch_bias_gelu_backward(const void* grad, const void* x, const void* bias, void* dx,
                                      float* sums, Format format, int64_t rows, int64_t columns,
                                      cudaStream_t stream);

}  // namespace ckptsurgeon
