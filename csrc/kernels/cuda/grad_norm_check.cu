// grad_norm_check on a GPU: one read of the gradients, sums in double, one partial sum per block.
#include "grad_norm_check.h"

#include "common.cuh"

namespace ckptsurgeon {
namespace {

__device__ __forceinline__ bool nonfinite(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) >= 0x7f800000u;
}

template <typename G>
__global__ void __launch_bounds__(kThreads)
    sum(const G* __restrict__ grad, int64_t n, double* __restrict__ partials) {
  double sumsq = 0;
  int bad = 0;
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
  sumsq = block_sum(sumsq);
  bad = block_sum(bad);
  if (threadIdx.x == 0) {
    partials[2 * blockIdx.x] = sumsq;
    partials[2 * blockIdx.x + 1] = bad;
  }
}

__global__ void __launch_bounds__(kThreads)
    add_blocks(const double* __restrict__ partials, int blocks, double* total) {
  for (int i = 0; i < 2; ++i) {
    const double sum = sum_of_blocks<2>(partials, blocks, i);
    if (threadIdx.x == 0) total[i] = sum;
  }
}

}  // namespace

int64_t partial_sums_of_grad_norm(int64_t n, int multiprocessors) {
  return 2 * int64_t{grid_size(n, 16, multiprocessors)};
}

cudaError_t launch_grad_norm_check(const void* grad, Format format, int64_t n, double* partials,
                                   double* total, int multiprocessors, cudaStream_t stream) {
  const int blocks = grid_size(n, 16, multiprocessors);
  const auto run = [&](const auto* g) {
    sum<<<blocks, kThreads, 0, stream>>>(g, n, partials);
  };
  switch (format) {
    case Format::kFloat:
      run(static_cast<const float*>(grad));
      break;
    case Format::kBf16:
      run(static_cast<const __nv_bfloat16*>(grad));
      break;
    case Format::kHalf:
      run(static_cast<const __half*>(grad));
      break;
  }
  add_blocks<<<1, kThreads, 0, stream>>>(partials, blocks, total);
  return cudaGetLastError();
}

}  // namespace ckptsurgeon
