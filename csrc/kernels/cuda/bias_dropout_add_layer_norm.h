// How the binding calls the CUDA kernels of bias_dropout_add_layer_norm.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

// An element is dropped where its word of Philox is below `threshold`, else times `factor`; a
// threshold of 0 with a factor of 1 is no dropout.
struct DropoutMask {
  uint32_t seed = 0, threshold = 0;
  float factor = 1;
};

cudaError_t launch_bias_dropout_add_layer_norm(const void* x, const void* bias,
                                               const void* residual, const void* weight,
                                               const void* shift, void* out, void* sum,
                                               float* stats, float eps, DropoutMask mask,
                                               Format format, int64_t rows, int64_t columns,
                                               cudaStream_t stream);

// `dx` may be null without dropout. `partials` is room for so many floats as the function below says.
cudaError_t launch_bias_dropout_add_layer_norm_backward(
    const void* grad_out, const void* grad_sum, const void* sum, const float* stats,
    const void* weight, void* dresidual, void* dx, void* dbias, void* dweight, void* dshift,
    float* partials, DropoutMask mask, Format format, int64_t rows, int64_t columns,
    cudaStream_t stream);

int64_t partial_sums_of_layer_norm(int64_t rows, int64_t columns);

}  // namespace ckptsurgeon
