// How the binding calls the CUDA kernels of causal_softmax.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

cudaError_t launch_causal_softmax(const void* scores, void* y, float scale, Format format,
                                  int64_t rows, int64_t queries, int64_t keys, cudaStream_t stream);

cudaError_t launch_causal_softmax_backward(const void* grad, const void* y, void* dx, float scale,
                                           Format format, int64_t rows, int64_t queries,
                                           int64_t keys, cudaStream_t stream);

}  // namespace ckptsurgeon
