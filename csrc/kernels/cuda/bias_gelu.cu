// bias_gelu on a GPU: t sigmoid(2 k0 t (1 + k1 t^2)) with t = x + bias. In backward a thread goes
// down its columns, so the sums for the bias stay in registers; neighbours read neighbours.
#include "bias_gelu.h"

#include "rows.cuh"

namespace ckptsurgeon {
namespace {

constexpr float kTwoK0 = 2 * 0.7978845608028654f;  // 2 sqrt(2 / pi)
constexpr float kK1 = 0.044715f;
constexpr float kFlat = 16;

__device__ __forceinline__ float gate(float t) {
  return __fdividef(1.0f, 1.0f + __expf(-kTwoK0 * t * (1 + kK1 * t * t)));
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    forward(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
            int64_t columns) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * N, across = step % columns;
  int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N, column = i % columns;
#pragma unroll 2
  for (; i < n; i += step) {
    const Pack<T, N> in = load<N>(x + i), b = load<N>(bias + column);
    Pack<T, N> out;
    for (int k = 0; k < N; ++k) {
      const float t = to_float(in.at[k]) + to_float(b.at[k]);
      from_float(t * gate(t), out.at[k]);
    }
    store(y + i, out);
    column += across;
    if (column >= columns) column -= columns;
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ bias,
             T* __restrict__ dx, float* __restrict__ partials, int64_t rows, int64_t columns,
             int64_t rows_each) {
  const Strip strip(rows, columns, rows_each, N);
  const int64_t column = strip.column;
  if (column >= columns) return;
  const Pack<T, N> b = load<N>(bias + column);
  Pack<float, N> sum = {};
#pragma unroll 4
  for (int64_t row = strip.first; row < strip.end; ++row) {
    const int64_t i = row * columns + column;
    const Pack<T, N> in = load<N>(x + i), g = load<N>(grad + i);
    Pack<T, N> out;
    for (int k = 0; k < N; ++k) {
      const float t = to_float(in.at[k]) + to_float(b.at[k]);
      const float s = gate(t);
      // Beyond kFlat s is 0 or 1, and t * t may overflow: 0 * inf is nan.
      const float bent = t < -kFlat ? -kFlat : t > kFlat ? kFlat : t;
      const float slope = s + bent * s * (1 - s) * kTwoK0 * (1 + 3 * kK1 * bent * bent);
      const float d = to_float(g.at[k]) * slope;
      from_float(d, out.at[k]);
      sum.at[k] += d;
    }
    store(dx + i, out);
  }
  store(partials + strip.number * columns + column, sum);
}

}  // namespace

cudaError_t launch_bias_gelu(const void* x, const void* bias, void* y, Format format, int64_t rows,
                             int64_t columns, int multiprocessors, cudaStream_t stream) {
  if (rows * columns == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto *in = static_cast<const T*>(x), *b = static_cast<const T*>(bias);
    auto* const out = static_cast<T*>(y);
    const int blocks = grid_size(rows * columns, 8, multiprocessors);
    const auto launch = [&](auto wide) {
      forward<T, wide.value><<<blocks, kThreads, 0, stream>>>(in, b, out, rows * columns, columns);
    };
    fits<kWide<T>>(columns, in, b, out) ? launch(Width<kWide<T>>{}) : launch(Width<1>{});
  });
  return cudaGetLastError();
}

cudaError_t launch_bias_gelu_backward(const void* grad, const void* x, const void* bias, void* dx,
                                      void* dbias, float* partials, Format format, int64_t rows,
                                      int64_t columns, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if (rows * columns != 0) {
      const auto *g = static_cast<const T*>(grad), *in = static_cast<const T*>(x);
      const auto* const b = static_cast<const T*>(bias);
      auto* const out = static_cast<T*>(dx);
      const auto launch = [&](auto wide) {
        backward<T, wide.value><<<column_grid(rows, columns, wide.value), kThreads, 0, stream>>>(
            g, in, b, out, partials, rows, columns, rows_of_strip(rows));
      };
      const bool wide = fits<kColumns>(columns, g, in, b, out) && fits<kColumns>(0, partials);
      wide ? launch(Width<kColumns>{}) : launch(Width<1>{});
      error = cudaGetLastError();
    }
    if (error != cudaSuccess) return;
    error = launch_add_strips(partials, Sums<T>{static_cast<T*>(dbias)}, 1, rows, columns, stream);
  });
  return error;
}

int64_t partial_sums_of_bias_gelu(int64_t rows, int64_t columns) {
  return strips_of(rows) * columns;
}

}  // namespace ckptsurgeon
