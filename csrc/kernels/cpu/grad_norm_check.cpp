// grad_norm_check on a CPU: one read of the gradients, sums in double.
#include "../common.h"

namespace ckptsurgeon {
namespace {

CKPT_INLINE bool nonfinite(float x) {
  return (bits_of<uint32_t>(x) & 0x7fffffffu) >= 0x7f800000u;
}

template <typename G>
CKPT_INLINE void sum_row(const G* __restrict g, int64_t n, double* out) {
  double sumsq = 0;
  int32_t bad = 0;
#pragma omp simd reduction(+ : sumsq, bad)
  for (int64_t i = 0; i < n; ++i) {
    const float x = to_float(g[i]);
    const double wide = x;
    sumsq += wide * wide;
    bad += nonfinite(x) ? 1 : 0;
  }
  out[0] = sumsq;
  out[1] = bad;
}

CKPT_CLONES void sum_float(const float* g, int64_t n, double* out) { sum_row(g, n, out); }
CKPT_CLONES void sum_bf16(const Bf16* g, int64_t n, double* out) { sum_row(g, n, out); }
CKPT_CLONES void sum_half(const Half* g, int64_t n, double* out) { sum_row(g, n, out); }

Tensor grad_norm_check(const Tensor& grad) {
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
  Tensor out = new_doubles(grad, 2);
  auto* total = static_cast<double*>(out.mutable_data_ptr());
  total[0] = total[1] = 0;
  for (const auto& sum : sums) {
    total[0] += sum[0];
    total[1] += sum[1];
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CPU, m) {
  m.impl("grad_norm_check", TORCH_BOX(&grad_norm_check));
}

}  // namespace ckptsurgeon
