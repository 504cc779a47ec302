// What the CUDA kernels share: number formats, sums over a warp and a grid. No torch header in this
// folder's .cu and .cuh files: nvcc alone compiles them, on a machine without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ckptsurgeon {

constexpr int kThreads = 256;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

__device__ __forceinline__ void from_float(float x, float& out) { out = x; }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& out) {
  out = __float2bfloat16_rn(x);
}
__device__ __forceinline__ void from_float(float x, __half& out) { out = __float2half_rn(x); }

// Four neighbours, moved by one instruction; `p` must be aligned to four elements.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};
template <typename T>
__device__ __forceinline__ Four<T> load4(const T* p) {
  return *reinterpret_cast<const Four<T>*>(p);
}
template <typename T>
__device__ __forceinline__ void store4(T* p, const Four<T>& four) {
  *reinterpret_cast<Four<T>*>(p) = four;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// As many blocks as fill the device several times over, and no more than the work needs.
inline int grid_size(int64_t n, int per_thread, int multiprocessors) {
  const int64_t wanted = (n + int64_t{kThreads} * per_thread - 1) / (int64_t{kThreads} * per_thread);
  const int64_t most = int64_t{multiprocessors} * 8;
  return static_cast<int>(wanted < most ? (wanted > 0 ? wanted : 1) : most);
}

}  // namespace ckptsurgeon
