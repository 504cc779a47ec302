// What the CUDA kernels over the rows of a matrix share: one block of threads per row, and sums
// over the columns of gradients.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "format.h"

namespace ckptsurgeon {

__device__ __forceinline__ float warp_max(float x) {
  for (int i = 16; i > 0; i >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

// The sum, or the largest, of one value per thread of the block; every thread gets it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float parts[kThreads / 32];
  x = warp_sum(x);
  __syncthreads();  // `parts` of an earlier call has been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kThreads / 32; ++i) total += parts[i];
  return total;
}
__device__ __forceinline__ float block_max(float x) {
  __shared__ float parts[kThreads / 32];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float most = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) most = fmaxf(most, parts[i]);
  return most;
}

// Rows that one block of threads adds up before it adds its sums to the total.
constexpr int kRowsPerSum = 32;

// All blocks in x, which alone may have more than 65535: `Strip` tells each its place.
inline dim3 column_grid(int64_t rows, int64_t columns) {
  const int64_t across = (columns + kThreads - 1) / kThreads;
  return dim3(static_cast<unsigned>(across * ((rows + kRowsPerSum - 1) / kRowsPerSum)));
}

// The rows from `first` to `end` of the column that a thread adds up; past the last column for none.
struct Strip {
  int64_t column, first, end;

  __device__ __forceinline__ Strip(int64_t rows, int64_t columns) {
    const int64_t across = (columns + kThreads - 1) / kThreads;
    column = blockIdx.x % across * kThreads + threadIdx.x;
    first = blockIdx.x / across * kRowsPerSum;
    end = first + kRowsPerSum < rows ? first + kRowsPerSum : rows;
  }
};

// Call `launch` with a null pointer of the format's element type.
template <typename Launch>
void by_format(Format format, const Launch& launch) {
  switch (format) {
    case Format::kFloat:
      return launch(static_cast<float*>(nullptr));
    case Format::kBf16:
      return launch(static_cast<__nv_bfloat16*>(nullptr));
    case Format::kHalf:
      return launch(static_cast<__half*>(nullptr));
  }
}

}  // namespace ckptsurgeon
