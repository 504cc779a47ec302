// causal_softmax on a GPU: a block of threads per row, which reads what the query may see, and
// keeps the beginning in registers.
#include "causal_softmax.h"

#include "rows.cuh"

namespace ckptsurgeon {
namespace {

// How many keys the query of a row sees.
__device__ __forceinline__ int64_t seen_by(int64_t row, int64_t queries, int64_t keys) {
  return row % queries + 1 + keys - queries;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    forward(const T* __restrict__ scores, T* __restrict__ y, float scale, int64_t queries,
            int64_t keys) {
  const int64_t row = blockIdx.x, seen = seen_by(row, queries, keys);
  Row<T, N> x{scores + row * keys};
  T* const out = y + row * keys;
  float most = -INFINITY;
  each_pack<N>(seen, [&](int64_t i, bool first) {
    const Pack<T, N> in = x.read(i, first);
    for (int k = 0; k < N; ++k) {
      if (i + k < seen) most = fmaxf(most, to_float(in.at[k]) * scale);
    }
  });
  most = block_max(most);
  float total = 0;
  each_pack<N>(seen, [&](int64_t i, bool first) {
    const Pack<T, N> in = x.again(i, first);
    for (int k = 0; k < N; ++k) {
      if (i + k < seen) total += __expf(to_float(in.at[k]) * scale - most);
    }
  });
  const float share = 1.0f / block_sum(total);
  each_pack<N>(keys, [&](int64_t i, bool first) {
    Pack<T, N> p;
    if (i < seen) p = x.again(i, first);
    for (int k = 0; k < N; ++k) {
      const bool sees = i + k < seen;
      from_float(sees ? __expf(to_float(p.at[k]) * scale - most) * share : 0.0f, p.at[k]);
    }
    store(out + i, p);
  });
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ dx, float scale,
             int64_t queries, int64_t keys) {
  const int64_t row = blockIdx.x, seen = seen_by(row, queries, keys);
  Row<T, N> grads{grad + row * keys}, shares{y + row * keys};
  float dot = 0;
  each_pack<N>(seen, [&](int64_t i, bool first) {
    const Pack<T, N> g = grads.read(i, first), p = shares.read(i, first);
    for (int k = 0; k < N; ++k) {
      if (i + k < seen) dot += to_float(g.at[k]) * to_float(p.at[k]);
    }
  });
  dot = block_sum(dot);
  each_pack<N>(keys, [&](int64_t i, bool first) {
    Pack<T, N> g, p;
    if (i < seen) {
      g = grads.again(i, first);
      p = shares.again(i, first);
    }
    for (int k = 0; k < N; ++k) {
      const bool sees = i + k < seen;
      from_float(sees ? (to_float(g.at[k]) - dot) * to_float(p.at[k]) * scale : 0.0f, g.at[k]);
    }
    store(dx + row * keys + i, g);
  });
}

}  // namespace

cudaError_t launch_causal_softmax(const void* scores, void* y, float scale, Format format,
                                  int64_t rows, int64_t queries, int64_t keys,
                                  cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto* const in = static_cast<const T*>(scores);
    auto* const out = static_cast<T*>(y);
    const auto launch = [&](auto wide) {
      forward<T, wide.value><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
          in, out, scale, queries, keys);
    };
    fits<kWide<T>>(keys, in, out) ? launch(Width<kWide<T>>{}) : launch(Width<1>{});
  });
  return cudaGetLastError();
}

cudaError_t launch_causal_softmax_backward(const void* grad, const void* y, void* dx, float scale,
                                           Format format, int64_t rows, int64_t queries,
                                           int64_t keys, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto *g = static_cast<const T*>(grad), *p = static_cast<const T*>(y);
    auto* const out = static_cast<T*>(dx);
    const auto launch = [&](auto wide) {
      backward<T, wide.value><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
          g, p, out, scale, queries, keys);
    };
    fits<kWide<T>>(keys, g, p, out) ? launch(Width<kWide<T>>{}) : launch(Width<1>{});
  });
  return cudaGetLastError();
}

}  // namespace ckptsurgeon
