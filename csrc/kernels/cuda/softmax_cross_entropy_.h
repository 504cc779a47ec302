// How the binding calls the CUDA kernel of softmax_cross_entropy_.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

cudaError_t launch_softmax_cross_entropy_(void* logits, const int64_t* targets, float* losses,
                                          float scale, Format format, int64_t rows, int64_t columns,
                                          cudaStream_t stream);

}  // namespace ckptsurgeon
