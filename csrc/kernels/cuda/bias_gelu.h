// How the binding calls the CUDA kernels of bias_gelu. Backward needs room for so many floats.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

cudaError_t launch_bias_gelu(const void* x, const void* bias, void* y, Format format, int64_t rows,
                             int64_t columns, int multiprocessors, cudaStream_t stream);

cudaError_t launch_bias_gelu_backward(const void* grad, const void* x, const void* bias, void* dx,
                                      void* dbias, float* partials, Format format, int64_t rows,
                                      int64_t columns, cudaStream_t stream);

int64_t partial_sums_of_bias_gelu(int64_t rows, int64_t columns);

}  // namespace ckptsurgeon
