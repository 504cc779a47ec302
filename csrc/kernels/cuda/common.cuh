// What the CUDA kernels share: number formats, and sums that do not depend on the order in which
// threads and blocks run: no atomics. No torch header in this folder's .cu and .cuh files: nvcc
// alone compiles them, on a machine without a GPU.
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

// N neighbours, moved by one instruction (of 16 bytes at the most); `p` must be aligned to them.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <typename T, int N>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}
template <typename T>
using Four = Pack<T, 4>;
template <typename T>
__device__ __forceinline__ Four<T> load4(const T* p) {
  return load<4>(p);
}
template <typename T>
__device__ __forceinline__ void store4(T* p, const Four<T>& four) {
  store(p, four);
}

// `op` over one value per thread of the block, in an order that is always the same; every thread
// gets the result.
template <typename T, typename Op>
__device__ __forceinline__ T block_reduce(T x, const Op& op) {
  __shared__ T parts[kThreads / 32];
  for (int i = 16; i > 0; i >>= 1) x = op(x, __shfl_xor_sync(~0u, x, i));
  __syncthreads();  // `parts` of an earlier call has been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  T total = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) total = op(total, parts[i]);
  return total;
}
template <typename T>
__device__ __forceinline__ T block_sum(T x) {
  return block_reduce(x, [](T a, T b) { return a + b; });
}

// The sum of column `i` of partial sums [blocks, N], by one block of threads.
template <int N>
__device__ __forceinline__ double sum_of_blocks(const double* partials, int blocks, int i) {
  double total = 0;
  for (int block = threadIdx.x; block < blocks; block += kThreads) total += partials[N * block + i];
  return block_sum(total);
}

// As many blocks as fill the device several times over, and no more than the work needs.
inline int grid_size(int64_t n, int per_thread, int multiprocessors) {
  const int64_t wanted = (n + int64_t{kThreads} * per_thread - 1) / (int64_t{kThreads} * per_thread);
  const int64_t most = int64_t{multiprocessors} * 8;
  return static_cast<int>(wanted < most ? (wanted > 0 ? wanted : 1) : most);
}

// Which tensor of a launch this block works on.
template <typename Table>
__device__ __forceinline__ int tensor_of_block(const Table& table) {
  int tensor = 0;
  while (table.first_block[tensor + 1] <= static_cast<int>(blockIdx.x)) ++tensor;
  return tensor;
}

// Shares out blocks among the tensors of a table: as many for each as it would get alone.
template <typename Table>
void share_out(Table& table, int per_thread, int multiprocessors) {
  table.first_block[0] = 0;
  for (int i = 0; i < table.count; ++i) {
    const int blocks = grid_size(table.n[i], per_thread, multiprocessors);
    table.first_block[i + 1] = table.first_block[i] + blocks;
  }
}

}  // namespace ckptsurgeon
