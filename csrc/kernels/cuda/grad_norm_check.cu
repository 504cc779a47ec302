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
    sum(const NormTable table, double* __restrict__ partials) {
  const int tensor = tensor_of_block(table);
  const int first = table.first_block[tensor];
  const G* __restrict__ const grad = static_cast<const G*>(table.g[tensor]);
  const int64_t n = table.n[tensor];
  double sumsq = 0;
  int bad = 0;
  const auto add = [&](G g) {
    const float x = to_float(g);
    sumsq += double{x} * double{x};
    bad += nonfinite(x) ? 1 : 0;
  };
  const int64_t thread = int64_t{blockIdx.x - first} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{table.first_block[tensor + 1] - first} * blockDim.x;
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
    add_blocks(const NormTable table, const double* __restrict__ partials, double* totals) {
  const int first = table.first_block[blockIdx.x];
  const int blocks = table.first_block[blockIdx.x + 1] - first;
  for (int i = 0; i < 2; ++i) {
    const double sum = sum_of_blocks<2>(partials + 2 * first, blocks, i);
    if (threadIdx.x == 0) totals[2 * blockIdx.x + i] = sum;
  }
}

}  // namespace

int64_t partial_sums_of_grad_norm(NormTable& table, int multiprocessors) {
  share_out(table, 16, multiprocessors);
  return 2 * int64_t{table.first_block[table.count]};
}

cudaError_t launch_grad_norm_check(const NormTable& table, Format format, double* partials,
                                   double* totals, cudaStream_t stream) {
  const int blocks = table.first_block[table.count];
  const auto run = [&](auto g) {
    sum<decltype(g)><<<blocks, kThreads, 0, stream>>>(table, partials);
  };
  switch (format) {
    case Format::kFloat:
      run(float{});
      break;
    case Format::kBf16:
      run(__nv_bfloat16{});
      break;
    case Format::kHalf:
      run(__half{});
      break;
  }
  add_blocks<<<table.count, kThreads, 0, stream>>>(table, partials, totals);
  return cudaGetLastError();
}

}  // namespace ckptsurgeon
