// grad_norm_check on a CPU: one read of the gradients, sums in double.
#include "../common.h"

namespace ckptsurgeon {
namespace {

// Elements between two prefetches.
constexpr int64_t kRun = 256;
// Sums kept side by side. One vector of them would wait for its own last addition: in the L1 cache
// that is two thirds of the speed, which is below the bandwidth of some hosts.
constexpr int64_t kLanes = 16;
// Blocks that are read in turns. One core asks for more lines at once in several places than in one:
// the hardware prefetches each, but only to the end of a page.
constexpr int64_t kStreams = 4;
// Blocks that each of them reads before all go on: a MiB of floats a turn.
constexpr int64_t kEach = 16;
// What lies this far ahead in a stream is asked for by hand, across its pages and blocks.
constexpr int64_t kAheadBytes = 2048;
constexpr int64_t kLineBytes = 64;

// Of one block: its squares, and how many of its elements are inf or nan.
using Sums = std::array<double, 2>;

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
CKPT_INLINE void add_run(const G* __restrict g, double* __restrict lanes) {
  const char* const ahead = reinterpret_cast<const char*>(g) + kAheadBytes;
  for (int64_t at = 0; at < kRun * static_cast<int64_t>(sizeof(G)); at += kLineBytes) {
    __builtin_prefetch(ahead + at);
  }
  add_squares(g, kRun, lanes);
}

template <typename G>
CKPT_INLINE void finish(const G* __restrict g, int64_t n, const double* lanes, Sums& out) {
  double sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  int64_t bad = 0;
  // The square of a finite float is far below the largest double: only inf and nan spoil the sum.
  if (!std::isfinite(sum)) {
    for (int64_t i = 0; i < n; ++i) bad += nonfinite(to_float(g[i])) ? 1 : 0;
  }
  out = {sum, static_cast<double>(bad)};
}

template <typename G>
CKPT_INLINE void sum_row(const G* __restrict g, int64_t n, Sums& out) {
  double lanes[kLanes] = {};
  int64_t done = 0;
  for (; done + kRun <= n; done += kRun) add_run(g + done, lanes);
  const int64_t whole = (n - done) / kLanes * kLanes;
  add_squares(g + done, whole, lanes);
  for (done += whole; done < n; ++done) {
    const double last = to_float(g[done]);
    lanes[0] += last * last;
  }
  finish(g, n, lanes, out);
}

// Whole blocks, each `kEach` from the next: the same sums as of `sum_row`, bit for bit.
template <typename G>
CKPT_INLINE void sum_rows(const G* __restrict g, Sums* out) {
  double lanes[kStreams][kLanes] = {};
  for (int64_t done = 0; done < kBlock; done += kRun) {
    for (int64_t s = 0; s < kStreams; ++s) add_run(g + s * kEach * kBlock + done, lanes[s]);
  }
  for (int64_t s = 0; s < kStreams; ++s) {
    finish(g + s * kEach * kBlock, kBlock, lanes[s], out[s * kEach]);
  }
}

// The sums of the blocks of `n` elements, of which the last may be short.
template <typename G>
CKPT_INLINE void sum_blocks(const G* g, int64_t n, Sums* out) {
  constexpr int64_t turn = kStreams * kEach * kBlock;
  for (; n >= turn; g += turn, n -= turn, out += kStreams * kEach) {
    for (int64_t b = 0; b < kEach; ++b) sum_rows(g + b * kBlock, out + b);
  }
  for (; n > 0; g += kBlock, n -= kBlock, ++out) sum_row(g, std::min(kBlock, n), *out);
}

CKPT_CLONES void sum_float(const float* g, int64_t n, Sums* out) { sum_blocks(g, n, out); }
CKPT_CLONES void sum_bf16(const Bf16* g, int64_t n, Sums* out) { sum_blocks(g, n, out); }
CKPT_CLONES void sum_half(const Half* g, int64_t n, Sums* out) { sum_blocks(g, n, out); }

void sum_tensor(const Tensor& grad, double* total) {
  STD_TORCH_CHECK(grad.is_contiguous(), "grad_norm_check: grad must be contiguous");
  const int64_t n = grad.numel();
  const ScalarType dtype = grad.scalar_type();
  auto sums = block_sums<2>(n);
  const auto over = [&](auto* g, auto sum) {
    for_spans(n, [&](int64_t first, int64_t offset, int64_t length) {
      sum(g + offset, length, &sums[first]);
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
