// softmax_cross_entropy_ on a GPU: a block of threads per row; one read for the largest logit and
// the sum together, one read and write for the gradient.
#include "softmax_cross_entropy_.h"

#include "rows.cuh"

namespace ckptsurgeon {
namespace {

// A target outside the row gives a loss of nan: the device can't refuse it as the host does.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    loss_and_gradient(T* logits, const int64_t* __restrict__ targets, float* __restrict__ losses,
                      float scale, int64_t columns) {
  T* const x = logits + int64_t{blockIdx.x} * columns;
  const int64_t target = targets[blockIdx.x];
  const bool inside = target >= 0 && target < columns;
  const float wanted = inside ? to_float(x[target]) : NAN;
  float most = -INFINITY, total = 0;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float logit = to_float(x[i]);
    if (logit > most) {
      total = total * __expf(most - logit) + 1;
      most = logit;
    } else {
      total += logit == most ? 1 : __expf(logit - most);  // inf - inf is nan
    }
    if (isnan(logit)) total = NAN;
  }
  const float mine = most;
  most = block_max(most);
  // A thread without a logit, or with none but -inf, adds nothing.
  total = block_sum(mine == -INFINITY && !isnan(total) ? 0 : total * __expf(mine - most));
  const float share = scale / total;
  // All threads have read the target's logit: block_sum waits for them.
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    const float p = __expf(to_float(x[i]) - most) * share;
    from_float(i == target ? p - scale : p, x[i]);
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
    loss_and_gradient<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        static_cast<T*>(logits), targets, losses, scale, columns);
  });
  return cudaGetLastError();
}

}  // namespace ckptsurgeon
