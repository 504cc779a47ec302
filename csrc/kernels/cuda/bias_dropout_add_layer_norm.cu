// bias_dropout_add_layer_norm on a GPU: a block of threads per row. Backward has a second kernel
// for the sums over rows, in which a thread goes down a column.
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

template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward(const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ residual,
            const T* __restrict__ weight, const T* __restrict__ shift, T* out, T* sum,
            float* stats, float eps, DropoutMask mask, int64_t columns) {
  const int64_t row = blockIdx.x, start = row * columns;
  float mean = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float kept = (to_float(x[start + i]) + to_float(bias[i])) * keep(mask, row, i, columns);
    from_float(kept + to_float(residual[start + i]), sum[start + i]);
    mean += to_float(sum[start + i]);
  }
  mean = block_sum(mean) / static_cast<float>(columns);
  float square = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float t = to_float(sum[start + i]) - mean;
    square += t * t;
  }
  const float rstd = rsqrtf(block_sum(square) / static_cast<float>(columns) + eps);
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float normal = (to_float(sum[start + i]) - mean) * rstd;
    from_float(normal * to_float(weight[i]) + to_float(shift[i]), out[start + i]);
  }
  if (threadIdx.x == 0) {
    stats[2 * row] = mean;
    stats[2 * row + 1] = rstd;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ grad_out, const T* __restrict__ grad_sum,
             const T* __restrict__ sum, const float* __restrict__ stats,
             const T* __restrict__ weight, T* __restrict__ dresidual, T* __restrict__ dx,
             DropoutMask mask, int64_t columns) {
  const int64_t row = blockIdx.x, start = row * columns;
  const float mean = stats[2 * row], rstd = stats[2 * row + 1];
  float a = 0, c = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float scaled = to_float(grad_out[start + i]) * to_float(weight[i]);
    a += scaled;
    c += scaled * (to_float(sum[start + i]) - mean) * rstd;
  }
  a = block_sum(a) / static_cast<float>(columns);
  c = block_sum(c) / static_cast<float>(columns);
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float normal = (to_float(sum[start + i]) - mean) * rstd;
    const float scaled = to_float(grad_out[start + i]) * to_float(weight[i]);
    const float d = (scaled - a - normal * c) * rstd + to_float(grad_sum[start + i]);
    from_float(d, dresidual[start + i]);
    if (dx != nullptr) from_float(d * keep(mask, row, i, columns), dx[start + i]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_columns(const T* __restrict__ grad_out, const T* __restrict__ sum,
                const float* __restrict__ stats, const T* __restrict__ dx,
                float* __restrict__ partials, int64_t rows, int64_t columns, int64_t rows_each) {
  const Strip strip(rows, columns, rows_each);
  const int64_t column = strip.column;
  if (column >= columns) return;
  float dbias = 0, dweight = 0, dshift = 0;
  for (int64_t row = strip.first; row < strip.end; ++row) {
    const int64_t i = row * columns + column;
    const float g = to_float(grad_out[i]);
    dbias += to_float(dx[i]);
    dweight += g * (to_float(sum[i]) - stats[2 * row]) * stats[2 * row + 1];
    dshift += g;
  }
  float* const mine = partials + 3 * strip.number * columns + column;
  mine[0] = dbias;
  mine[columns] = dweight;
  mine[2 * columns] = dshift;
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
    forward<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<const T*>(residual),
        static_cast<const T*>(weight), static_cast<const T*>(shift), static_cast<T*>(out),
        static_cast<T*>(sum), stats, eps, mask, columns);
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
    auto *dr = static_cast<T*>(dresidual), *d = static_cast<T*>(dx);
    if (rows * columns != 0) {
      backward<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
          g, static_cast<const T*>(grad_sum), s, stats, static_cast<const T*>(weight), dr, d, mask,
          columns);
      sum_columns<<<column_grid(rows, columns), kThreads, 0, stream>>>(
          g, s, stats, d == nullptr ? dr : d, partials, rows, columns, rows_of_strip(rows));
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
