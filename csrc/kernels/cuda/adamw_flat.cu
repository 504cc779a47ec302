// adamw_flat_ on a GPU: unscale, clip, AdamW, statistics and low-precision copy in one pass.
#include "adamw_flat.h"

#include <type_traits>

#include "common.cuh"

namespace ckptsurgeon {
namespace {

struct None {};  // no low-precision copy

constexpr int kSums = 6;

struct Sums {
  float v_sum = 0, p_sq = 0, change_sq = 0, ratio_sq = 0;
  int zeros = 0;
  int v_max = 0;  // v is never negative, so its bits are in its order, and nan is above inf
};

__device__ __forceinline__ void step_one(float& p, float& m, float& v, float g, float grad_mul,
                                         const Hyper& h, Sums& sums) {
  const float grad = g * grad_mul;
  const float old_p = p;
  m = h.beta1 * m + h.beta1_new * grad;
  v = h.beta2 * v + h.beta2_new * grad * grad;
  const float ratio = m / (sqrtf(v) * h.v_correction + h.eps);
  p = old_p * h.decay - h.step_size * ratio;
  const float change = p - old_p;
  sums.v_sum += v;
  sums.v_max = max(sums.v_max, __float_as_int(v) & 0x7fffffff);
  sums.p_sq += p * p;
  sums.change_sq += change * change;
  sums.ratio_sq += ratio * ratio;
  sums.zeros += g == 0 ? 1 : 0;
}

template <typename O>
constexpr bool kCopies = !std::is_same_v<O, None>;

template <typename T>
__device__ __forceinline__ bool aligned4(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Four<T>) == 0;
}

template <typename G, typename O>
__global__ void __launch_bounds__(kThreads)
    adamw(const AdamwTable table, const float* __restrict__ grad_mul, Hyper h,
          double* __restrict__ partials) {
  const int tensor = tensor_of_block(table);
  const int first = table.first_block[tensor];
  float* __restrict__ const p = table.p[tensor];
  float* __restrict__ const m = table.m[tensor];
  float* __restrict__ const v = table.v[tensor];
  const G* __restrict__ const g = static_cast<const G*>(table.g[tensor]);
  O* __restrict__ const out = static_cast<O*>(table.out[tensor]);
  const float mul = *grad_mul;
  const int64_t n = mul < 0 ? 0 : table.n[tensor];  // all stays as it is
  Sums sums;
  const int64_t thread = int64_t{blockIdx.x - first} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{table.first_block[tensor + 1] - first} * blockDim.x;
  // A partition may start anywhere in its buffer.
  bool aligned = aligned4(p) && aligned4(m) && aligned4(v) && aligned4(g);
  if constexpr (kCopies<O>) aligned = aligned && aligned4(out);
  const int64_t fours = aligned ? n / 4 : 0;
  for (int64_t i = thread; i < fours; i += threads) {
    Four<float> ps = load4(p + 4 * i), ms = load4(m + 4 * i), vs = load4(v + 4 * i);
    const Four<G> gs = load4(g + 4 * i);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      step_one(ps.at[k], ms.at[k], vs.at[k], to_float(gs.at[k]), mul, h, sums);
    }
    store4(p + 4 * i, ps);
    store4(m + 4 * i, ms);
    store4(v + 4 * i, vs);
    if constexpr (kCopies<O>) {
      Four<O> low;
#pragma unroll
      for (int k = 0; k < 4; ++k) from_float(ps.at[k], low.at[k]);
      store4(out + 4 * i, low);
    }
  }
  for (int64_t i = 4 * fours + thread; i < n; i += threads) {
    step_one(p[i], m[i], v[i], to_float(g[i]), mul, h, sums);
    if constexpr (kCopies<O>) from_float(p[i], out[i]);
  }
  const double v_sum = block_sum(double{sums.v_sum});
  const double p_sq = block_sum(double{sums.p_sq});
  const double change_sq = block_sum(double{sums.change_sq});
  const double ratio_sq = block_sum(double{sums.ratio_sq});
  const double zeros = block_sum(static_cast<double>(sums.zeros));
  const int v_max = block_reduce(sums.v_max, [](int a, int b) { return max(a, b); });
  if (threadIdx.x == 0) {
    double* const mine = partials + kSums * blockIdx.x;
    mine[0] = v_sum;
    mine[1] = double{__int_as_float(v_max)};
    mine[2] = p_sq;
    mine[3] = change_sq;
    mine[4] = ratio_sq * h.m_correction * h.m_correction;
    mine[5] = zeros;
  }
}

__global__ void __launch_bounds__(kThreads)
    add_blocks(const AdamwTable table, const double* __restrict__ all_partials, double* all_stats) {
  const int first = table.first_block[blockIdx.x];
  const int blocks = table.first_block[blockIdx.x + 1] - first;
  const double* const partials = all_partials + kSums * first;
  double* const stats = all_stats + kSums * blockIdx.x;
  for (int i = 0; i < kSums; ++i) {
    if (i == 1) continue;
    const double sum = sum_of_blocks<kSums>(partials, blocks, i);
    if (threadIdx.x == 0) stats[i] = sum;
  }
  // Doubles that are not negative are in the order of their bits, and nan is above inf.
  long long most = 0;
  for (int block = threadIdx.x; block < blocks; block += kThreads) {
    most = max(most, __double_as_longlong(partials[kSums * block + 1]));
  }
  most = block_reduce(most, [](long long a, long long b) { return max(a, b); });
  if (threadIdx.x == 0) stats[1] = __longlong_as_double(most);
}

}  // namespace

int64_t partial_sums_of_adamw(AdamwTable& table, int multiprocessors) {
  share_out(table, 4, multiprocessors);
  return kSums * int64_t{table.first_block[table.count]};
}

cudaError_t launch_adamw_flat(const AdamwTable& table, Format g_format, Format out_format,
                              const float* grad_mul, Hyper hyper, double* partials, double* stats,
                              cudaStream_t stream) {
  const int blocks = table.first_block[table.count];
  const auto run = [&](auto g, auto out) {
    adamw<decltype(g), decltype(out)><<<blocks, kThreads, 0, stream>>>(table, grad_mul, hyper,
                                                                       partials);
    add_blocks<<<table.count, kThreads, 0, stream>>>(table, partials, stats);
    return cudaGetLastError();
  };
  const auto copy_to = [&](auto g) {
    if (table.out[0] == nullptr) return run(g, None{});
    switch (out_format) {
      case Format::kFloat:
        return run(g, float{});
      case Format::kBf16:
        return run(g, __nv_bfloat16{});
      default:
        return run(g, __half{});
    }
  };
  switch (g_format) {
    case Format::kFloat:
      return copy_to(float{});
    case Format::kBf16:
      return copy_to(__nv_bfloat16{});
    default:
      return copy_to(__half{});
  }
}

}  // namespace ckptsurgeon
