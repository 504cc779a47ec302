// grad_norm_check on a CPU: one read of the gradients, sums in double.
#include "../common.h"

namespace ckptsurgeon {
namespace {

// Elements between two prefetches.
constexpr int64_t kRun = 256;
// Sums kept side by side. One vector of them would wait for its own last addition: in the L1 cache
// that is two thirds of the speed, which is below the bandwidth of some hosts.
constexpr int64_t kLanes = 16;
// The hardware prefetches to the end of a page. What lies this far ahead is asked for by hand.
constexpr int64_t kAheadBytes = 16384;
constexpr int64_t kLineBytes = 64;

CKPT_INLINE bool nonfinite(float x) {
  return (bits_of<uint32_t>(x) & 0x7fffffffu) >= 0x7f800000u;
}

// The squares of `n` elements, a multiple of kLanes, are added to `lanes`.
template <typename G>
CKPT_INLINE void add_squares(const G* __restrict g, int64_t n, double* __restrict lanes) {
  for (int64_t i = 0; i < n; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double x = to_float(g[i + lane]);
      lanes[lane] += x * x;
    }
  }
}

// Two at a time, which are one word: half the loads.
CKPT_INLINE void add_squares(const Bf16* __restrict g, int64_t n, double* __restrict lanes) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n / 2; ++i) {
    uint32_t pair;
    std::memcpy(&pair, g + 2 * i, sizeof(pair));
    const double low = bits_of<float>(pair << 16);
    const double high = bits_of<float>(pair & 0xffff0000u);
    sum += low * low;
    sum += high * high;
  }
  lanes[0] += sum;
}

template <typename G>
CKPT_INLINE void sum_row(const G* __restrict g, int64_t n, double* out) {
  double lanes[kLanes] = {};
  int64_t done = 0;
  for (; done + kRun <= n; done += kRun) {
    const char* const ahead = reinterpret_cast<const char*>(g + done) + kAheadBytes;
    for (int64_t at = 0; at < kRun * static_cast<int64_t>(sizeof(G)); at += kLineBytes) {
      __builtin_prefetch(ahead + at);
    }
    add_squares(g + done, kRun, lanes);
  }
  const int64_t whole = (n - done) / kLanes * kLanes;
  add_squares(g + done, whole, lanes);
  for (done += whole; done < n; ++done) {
    const double last = to_float(g[done]);
    lanes[0] += last * last;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  int64_t bad = 0;
  // The square of a finite float is far below the largest double: only inf and nan spoil the sum.
  if (!std::isfinite(sum)) {
    for (int64_t i = 0; i < n; ++i) bad += nonfinite(to_float(g[i])) ? 1 : 0;
  }
  out[0] = sum;
  out[1] = static_cast<double>(bad);
}

CKPT_CLONES void sum_float(const float* g, int64_t n, double* out) { sum_row(g, n, out); }
CKPT_CLONES void sum_bf16(const Bf16* g, int64_t n, double* out) { sum_row(g, n, out); }
CKPT_CLONES void sum_half(const Half* g, int64_t n, double* out) { sum_row(g, n, out); }

void sum_tensor(const Tensor& grad, double* total) {
  STD_TORCH_CHECK(grad.is_contiguous(), "grad_norm_check: grad must be contiguous");
  const int64_t n = grad.numel();
  const ScalarType dtype = grad.scalar_type();
  auto sums = block_sums<2>(n);
  const auto over = [&](auto* g, auto row) {
    for_blocks(n, [&](int64_t block, int64_t offset, int64_t length) {
      row(g + offset, length, sums[block].data());
    });
  };
  if (dtype == ScalarType::Float) {
    over(static_cast<const float*>(grad.const_data_ptr()), sum_float);
  } else if (dtype == ScalarType::BFloat16) {
    over(static_cast<const Bf16*>(grad.const_data_ptr()), sum_bf16);
  } else if (dtype == ScalarType::Half) {
    over(static_cast<const Half*>(grad.const_data_ptr()), sum_half);
  } else {
    STD_TORCH_CHECK(false, "grad_norm_check: grad must be float32, bfloat16 or float16");
  }
  total[0] = total[1] = 0;
  for (const auto& sum : sums) {
    total[0] += sum[0];
    total[1] += sum[1];
  }
}

Tensor grad_norm_check(std::vector<Tensor> grads) {
  STD_TORCH_CHECK(!grads.empty(), "grad_norm_check: there must be a gradient");
  Tensor out = new_doubles(grads[0], {static_cast<int64_t>(grads.size()), 2});
  auto* total = static_cast<double*>(out.mutable_data_ptr());
  for (const Tensor& grad : grads) {
    sum_tensor(grad, total);
    total += 2;
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CPU, m) {
  m.impl("grad_norm_check", TORCH_BOX(&grad_norm_check));
}

}  // namespace ckptsurgeon
