// softmax_cross_entropy_ on a GPU: a block of threads per row; one read for the largest logit and
// the sum together, one read and write for the gradient.
#include "softmax_cross_entropy_.h"

#include "rows.cuh"

namespace ckptsurgeon {
namespace {

// A target outside the row gives a loss of nan: the device can't refuse it as the host does.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    loss_and_gradient(T* logits, const int64_t* __restrict__ targets, float* __restrict__ losses,
                      float scale, int64_t columns) {
  T* const x = logits + int64_t{blockIdx.x} * columns;
  const int64_t target = targets[blockIdx.x];
  const bool inside = target >= 0 && target < columns;
  const float wanted = inside ? to_float(x[target]) : NAN;
  float most = -INFINITY, total = 0;
#pragma unroll 4
  for (int64_t i = N * threadIdx.x; i < columns; i += N * kThreads) {
    const Pack<T, N> logits = load<N>(x + i);
    float larger = most;  // nan is smaller than any number here
    for (int k = 0; k < N; ++k) larger = fmaxf(larger, to_float(logits.at[k]));
    if (larger > most) total *= __expf(most - larger);
    most = larger;
    for (int k = 0; k < N; ++k) {
      const float logit = to_float(logits.at[k]);
      total += logit == most ? 1 : __expf(logit - most);  // inf - inf is nan
    }
  }
  const float mine = most;
  most = block_max(most);
  // A thread without a logit, or with none but -inf, adds nothing.
  total = block_sum(mine == -INFINITY && !isnan(total) ? 0 : total * __expf(mine - most));
  const float share = scale / total;
  // All threads have read the target's logit: block_sum waits for them.
#pragma unroll 4
  for (int64_t i = N * threadIdx.x; i < columns; i += N * kThreads) {
    Pack<T, N> logits = load<N>(x + i);
    for (int k = 0; k < N; ++k) {
      const float p = __expf(to_float(logits.at[k]) - most) * share;
      from_float(i + k == target ? p - scale : p, logits.at[k]);
    }
    store(x + i, logits);
  }
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) + most - wanted;
}

}  // namespace

cudaError_t launch_softmax_cross_entropy_(void* logits, const int64_t* targets, float* losses,
                                          float scale, Format format, int64_t rows, int64_t columns,
                                          cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  by_format(format, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    auto* const x = static_cast<T*>(logits);
    const auto launch = [&](auto wide) {
      loss_and_gradient<T, wide.value><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
          x, targets, losses, scale, columns);
    };
    fits<kWide<T>>(columns, x) ? launch(Width<kWide<T>>{}) : launch(Width<1>{});
  });
  return cudaGetLastError();
}

}  // namespace ckptsurgeon
