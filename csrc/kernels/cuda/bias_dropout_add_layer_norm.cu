// bias_dropout_add_layer_norm on a GPU: a block of threads per row, whose beginning it keeps in
// registers. Backward has a second kernel for the sums over rows: a thread goes down its columns.
#include "bias_dropout_add_layer_norm.h"

#include "../philox.h"
#include "rows.cuh"

namespace ckptsurgeon {
namespace {

__device__ __forceinline__ float keep(DropoutMask mask, int64_t row, int64_t i, int64_t columns) {
  if (mask.threshold == 0) return mask.factor;
  const int64_t half = (columns + 1) / 2;
  const Philox words = philox(static_cast<uint32_t>(i < half ? i : i - half),
                              static_cast<uint32_t>(row), mask.seed);
  return (i < half ? words.first : words.second) >= mask.threshold ? mask.factor : 0.0f;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    forward(const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ residual,
            const T* __restrict__ weight, const T* __restrict__ shift, T* out, T* sum,
            float* stats, float eps, DropoutMask mask, int64_t columns) {
  const int64_t row = blockIdx.x, start = row * columns;
  Row<T, N> sums{sum + start};
  float mean = 0;
  each_pack<N>(columns, [&](int64_t i, bool first) {
    const Pack<T, N> in = load<N>(x + start + i), b = load<N>(bias + i);
    Pack<T, N> total = load<N>(residual + start + i);
    for (int k = 0; k < N; ++k) {
      const float t = (to_float(in.at[k]) + to_float(b.at[k])) * keep(mask, row, i + k, columns);
      from_float(t + to_float(total.at[k]), total.at[k]);
      mean += to_float(total.at[k]);
    }
    store(sum + start + i, sums.keep(total, first));
  });
  mean = block_sum(mean) / static_cast<float>(columns);
  float square = 0;
  each_pack<N>(columns, [&](int64_t i, bool first) {
    const Pack<T, N> total = sums.again(i, first);
    for (int k = 0; k < N; ++k) {
      const float t = to_float(total.at[k]) - mean;
      square += t * t;
    }
  });
  const float rstd = rsqrtf(block_sum(square) / static_cast<float>(columns) + eps);
  each_pack<N>(columns, [&](int64_t i, bool first) {
    Pack<T, N> total = sums.again(i, first);
    const Pack<T, N> w = load<N>(weight + i), s = load<N>(shift + i);
    for (int k = 0; k < N; ++k) {
      const float normal = (to_float(total.at[k]) - mean) * rstd;
      from_float(normal * to_float(w.at[k]) + to_float(s.at[k]), total.at[k]);
    }
    store(out + start + i, total);
  });
  if (threadIdx.x == 0) {
    stats[2 * row] = mean;
    stats[2 * row + 1] = rstd;
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ grad_out, const T* __restrict__ grad_sum,
             const T* __restrict__ sum, const float* __restrict__ stats,
             const T* __restrict__ weight, T* __restrict__ dresidual, T* __restrict__ dx,
             DropoutMask mask, int64_t columns) {
  const int64_t row = blockIdx.x, start = row * columns;
  const float mean = stats[2 * row], rstd = stats[2 * row + 1];
  Row<T, N> grads{grad_out + start}, sums{sum + start};
  float a = 0, c = 0;
  each_pack<N>(columns, [&](int64_t i, bool first) {
    const Pack<T, N> g = grads.read(i, first), total = sums.read(i, first), w = load<N>(weight + i);
    for (int k = 0; k < N; ++k) {
      const float scaled = to_float(g.at[k]) * to_float(w.at[k]);
      a += scaled;
      c += scaled * (to_float(total.at[k]) - mean) * rstd;
    }
  });
  a = block_sum(a) / static_cast<float>(columns);
  c = block_sum(c) / static_cast<float>(columns);
  each_pack<N>(columns, [&](int64_t i, bool first) {
    const Pack<T, N> g = grads.again(i, first), total = sums.again(i, first), w = load<N>(weight + i);
    Pack<T, N> out = load<N>(grad_sum + start + i), dropped;
    for (int k = 0; k < N; ++k) {
      const float normal = (to_float(total.at[k]) - mean) * rstd;
      const float scaled = to_float(g.at[k]) * to_float(w.at[k]);
      const float d = (scaled - a - normal * c) * rstd + to_float(out.at[k]);
      from_float(d, out.at[k]);
      if (dx != nullptr) from_float(d * keep(mask, row, i + k, columns), dropped.at[k]);
    }
    store(dresidual + start + i, out);
    if (dx != nullptr) store(dx + start + i, dropped);
  });
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    sum_columns(const T* __restrict__ grad_out, const T* __restrict__ sum,
                const float* __restrict__ stats, const T* __restrict__ dx,
                float* __restrict__ partials, int64_t rows, int64_t columns, int64_t rows_each) {
  const Strip strip(rows, columns, rows_each, N);
  const int64_t column = strip.column;
  if (column >= columns) return;
  Pack<float, N> dbias = {}, dweight = {}, dshift = {};
#pragma unroll 4
  for (int64_t row = strip.first; row < strip.end; ++row) {
    const int64_t i = row * columns + column;
    const Pack<T, N> grad = load<N>(grad_out + i), total = load<N>(sum + i), d = load<N>(dx + i);
    for (int k = 0; k < N; ++k) {
      const float g = to_float(grad.at[k]);
      dbias.at[k] += to_float(d.at[k]);
      dweight.at[k] += g * (to_float(total.at[k]) - stats[2 * row]) * stats[2 * row + 1];
      dshift.at[k] += g;
    }
  }
  float* const mine = partials + 3 * strip.number * columns + column;
  store(mine, dbias);
  store(mine + columns, dweight);
  store(mine + 2 * columns, dshift);
}

}  // namespace

cudaError_t launch_bias_dropout_add_layer_norm(const void* x, const void* bias,
                                               const void* residual, const void* weight,
                                               const void* shift, void* out, void* sum,
                                               float* stats, float eps, DropoutMask mask,
                                               Format format, int64_t rows, int64_t columns,
                                               cudaStream_t stream) {
  if (rows * columns == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto *in = static_cast<const T*>(x), *b = static_cast<const T*>(bias);
    const auto *r = static_cast<const T*>(residual), *w = static_cast<const T*>(weight);
    const auto* const s = static_cast<const T*>(shift);
    auto *y = static_cast<T*>(out), *total = static_cast<T*>(sum);
    const auto launch = [&](auto wide) {
      forward<T, wide.value><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
          in, b, r, w, s, y, total, stats, eps, mask, columns);
    };
    const bool wide = fits<kWide<T>>(columns, in, b, r, w, s, y, total);
    wide ? launch(Width<kWide<T>>{}) : launch(Width<1>{});
  });
  return cudaGetLastError();
}

cudaError_t launch_bias_dropout_add_layer_norm_backward(
    const void* grad_out, const void* grad_sum, const void* sum, const float* stats,
    const void* weight, void* dresidual, void* dx, void* dbias, void* dweight, void* dshift,
    float* partials, DropoutMask mask, Format format, int64_t rows, int64_t columns,
    cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto *g = static_cast<const T*>(grad_out), *s = static_cast<const T*>(sum);
    const auto *gs = static_cast<const T*>(grad_sum), *w = static_cast<const T*>(weight);
    auto *dr = static_cast<T*>(dresidual), *d = static_cast<T*>(dx);
    if (rows * columns != 0) {
      const auto whole = [&](auto wide) {
        backward<T, wide.value><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
            g, gs, s, stats, w, dr, d, mask, columns);
      };
      fits<kWide<T>>(columns, g, gs, s, w, dr, d) ? whole(Width<kWide<T>>{}) : whole(Width<1>{});
      const auto sums = [&](auto wide) {
        sum_columns<T, wide.value><<<column_grid(rows, columns, wide.value), kThreads, 0, stream>>>(
            g, s, stats, d == nullptr ? dr : d, partials, rows, columns, rows_of_strip(rows));
      };
      const bool four = fits<kColumns>(columns, g, s, dr, d) && fits<kColumns>(0, partials);
      four ? sums(Width<kColumns>{}) : sums(Width<1>{});
      error = cudaGetLastError();
    }
    if (error != cudaSuccess) return;
    const Sums<T> out{static_cast<T*>(dbias), static_cast<T*>(dweight), static_cast<T*>(dshift)};
    error = launch_add_strips(partials, out, 3, rows, columns, stream);
  });
  return error;
}

int64_t partial_sums_of_layer_norm(int64_t rows, int64_t columns) {
  return 3 * strips_of(rows) * columns;
}

}  // namespace ckptsurgeon
