// bias_gelu on a GPU: t sigmoid(2 k0 t (1 + k1 t^2)) with t = x + bias. In backward a thread goes
// down a column, so the sum for the bias stays in a register; neighbours read neighbours.
#include "bias_gelu.h"

#include "rows.cuh"

namespace ckptsurgeon {
namespace {

constexpr float kTwoK0 = 2 * 0.7978845608028654f;  // 2 sqrt(2 / pi)
constexpr float kK1 = 0.044715f;
constexpr float kFlat = 16;

__device__ __forceinline__ float gate(float t) {
  return 1.0f / (1.0f + __expf(-kTwoK0 * t * (1 + kK1 * t * t)));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t n,
            int64_t columns, bool fours) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const auto one = [&](T in, T b) {
    const float t = to_float(in) + to_float(b);
    T out;
    from_float(t * gate(t), out);
    return out;
  };
  if (!fours) {
    for (int64_t i = thread; i < n; i += threads) y[i] = one(x[i], bias[i % columns]);
    return;
  }
  for (int64_t i = 4 * thread; i < n; i += 4 * threads) {
    const Four<T> in = load4(x + i), b = load4(bias + i % columns);
    Four<T> out;
    for (int k = 0; k < 4; ++k) out.at[k] = one(in.at[k], b.at[k]);
    store4(y + i, out);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ bias,
             T* __restrict__ dx, float* __restrict__ partials, int64_t rows, int64_t columns,
             int64_t rows_each) {
  const Strip strip(rows, columns, rows_each);
  const int64_t column = strip.column;
  if (column >= columns) return;
  const float b = to_float(bias[column]);
  float sum = 0;
  for (int64_t row = strip.first; row < strip.end; ++row) {
    const int64_t i = row * columns + column;
    const float t = to_float(x[i]) + b;
    const float s = gate(t);
    // Beyond kFlat s is 0 or 1, and t * t may overflow: 0 * inf is nan.
    const float bent = t < -kFlat ? -kFlat : t > kFlat ? kFlat : t;
    const float slope = s + bent * s * (1 - s) * kTwoK0 * (1 + 3 * kK1 * bent * bent);
    const float d = to_float(grad[i]) * slope;
    from_float(d, dx[i]);
    sum += d;
  }
  partials[strip.number * columns + column] = sum;
}

bool aligned(const void* p, size_t size) {
  return reinterpret_cast<uintptr_t>(p) % (4 * size) == 0;
}

}  // namespace

cudaError_t launch_bias_gelu(const void* x, const void* bias, void* y, Format format, int64_t rows,
                             int64_t columns, int multiprocessors, cudaStream_t stream) {
  if (rows * columns == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const bool fours = columns % 4 == 0 && aligned(x, sizeof(T)) && aligned(bias, sizeof(T)) &&
                       aligned(y, sizeof(T));
    const int blocks = grid_size(rows * columns, 8, multiprocessors);
    forward<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x), static_cast<const T*>(bias),
                                             static_cast<T*>(y), rows * columns, columns, fours);
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
      backward<<<column_grid(rows, columns), kThreads, 0, stream>>>(
          static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<const T*>(bias),
          static_cast<T*>(dx), partials, rows, columns, rows_of_strip(rows));
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
