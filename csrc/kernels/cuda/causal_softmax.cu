// causal_softmax on a GPU: a block of threads per row, which reads what the query may see; the
// second and third read of it come from the L1 cache.
#include "causal_softmax.h"

#include "rows.cuh"

namespace ckptsurgeon {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward(const T* __restrict__ scores, T* __restrict__ y, float scale, int64_t queries,
            int64_t keys) {
  const int64_t row = blockIdx.x;
  const int64_t seen = row % queries + 1 + keys - queries;
  const T* const x = scores + row * keys;
  T* const out = y + row * keys;
  float most = -INFINITY;
  for (int64_t i = threadIdx.x; i < seen; i += kThreads) most = fmaxf(most, to_float(x[i]) * scale);
  most = block_max(most);
  float total = 0;
  for (int64_t i = threadIdx.x; i < seen; i += kThreads) {
    total += __expf(to_float(x[i]) * scale - most);
  }
  const float share = 1.0f / block_sum(total);
  for (int64_t i = threadIdx.x; i < keys; i += kThreads) {
    from_float(i < seen ? __expf(to_float(x[i]) * scale - most) * share : 0.0f, out[i]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ dx, float scale,
             int64_t queries, int64_t keys) {
  const int64_t row = blockIdx.x;
  const int64_t seen = row % queries + 1 + keys - queries;
  const T *const g = grad + row * keys, *const p = y + row * keys;
  float dot = 0;
  for (int64_t i = threadIdx.x; i < seen; i += kThreads) dot += to_float(g[i]) * to_float(p[i]);
  dot = block_sum(dot);
  for (int64_t i = threadIdx.x; i < keys; i += kThreads) {
    from_float(i < seen ? (to_float(g[i]) - dot) * to_float(p[i]) * scale : 0.0f,
               dx[row * keys + i]);
  }
}

}  // namespace

cudaError_t launch_causal_softmax(const void* scores, void* y, float scale, Format format,
                                  int64_t rows, int64_t queries, int64_t keys,
                                  cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    forward<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        static_cast<const T*>(scores), static_cast<T*>(y), scale, queries, keys);
  });
  return cudaGetLastError();
}

cudaError_t launch_causal_softmax_backward(const void* grad, const void* y, void* dx, float scale,
                                           Format format, int64_t rows, int64_t queries,
                                           int64_t keys, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    backward<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        static_cast<const T*>(grad), static_cast<const T*>(y), static_cast<T*>(dx), scale, queries,
        keys);
  });
  return cudaGetLastError();
}

}  // namespace ckptsurgeon
