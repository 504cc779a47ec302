// grad_norm_check on a GPU: one read of the gradients, sums in double, one atomic per warp.
#include "grad_norm_check.h"

#include "common.cuh"

namespace ckptsurgeon {
namespace {

__device__ __forceinline__ bool nonfinite(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) >= 0x7f800000u;
}

template <typename G>
__global__ void __launch_bounds__(kThreads) sum(const G* __restrict__ grad, int64_t n, double* total) {
  double sumsq = 0;
  double bad = 0;
  const auto add = [&](G g) {
    const float x = to_float(g);
    sumsq += double{x} * double{x};
    bad += nonfinite(x) ? 1 : 0;
  };
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  // A gradient may be a view that starts anywhere in its buffer.
  const bool aligned = reinterpret_cast<uintptr_t>(grad) % sizeof(Four<G>) == 0;
  const int64_t fours = aligned ? n / 4 : 0;
  for (int64_t i = thread; i < fours; i += threads) {
    const Four<G> four = load4(grad + 4 * i);
    for (int k = 0; k < 4; ++k) add(four.at[k]);
  }
  for (int64_t i = 4 * fours + thread; i < n; i += threads) add(grad[i]);
  sumsq = warp_sum(sumsq);
  bad = warp_sum(bad);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(total, sumsq);
    atomicAdd(total + 1, bad);
  }
}

}  // namespace

cudaError_t launch_grad_norm_check(const void* grad, Format format, int64_t n, double* total,
                                   int multiprocessors, cudaStream_t stream) {
  const int blocks = grid_size(n, 16, multiprocessors);
  switch (format) {
    case Format::kFloat:
      sum<<<blocks, kThreads, 0, stream>>>(static_cast<const float*>(grad), n, total);
      break;
    case Format::kBf16:
      sum<<<blocks, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(grad), n, total);
      break;
    case Format::kHalf:
      sum<<<blocks, kThreads, 0, stream>>>(static_cast<const __half*>(grad), n, total);
      break;
  }
  return cudaGetLastError();
}

}  // namespace ckptsurgeon
