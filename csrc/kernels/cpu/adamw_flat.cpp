// adamw_flat_ on a CPU: unscale, clip, AdamW, statistics and low-precision copy in one pass.
#include "../adamw_hyper.h"
#include "../common.h"

#include <type_traits>

namespace ckptsurgeon {
namespace {

struct None {};  // no low-precision copy

// `sums`: |v|_1, max v, |p|^2, |change of p|^2 and |m / sqrt(v)|^2 of these elements, where m is not
// yet corrected, and how many of their gradients are 0.
template <typename G, typename O>
CKPT_INLINE void step_row(float* __restrict p, float* __restrict m, float* __restrict v,
                          const G* __restrict g, O* __restrict out, int64_t n, float grad_mul,
                          const Hyper& hyper, double* sums) {
  const Hyper h = hyper;
  float v_sum = 0, p_sq = 0, change_sq = 0, ratio_sq = 0;
  int32_t zeros = 0;
  int32_t v_max = 0;  // v is never negative, so its bits are in its order, and nan is above inf
#pragma omp simd reduction(+ : v_sum, p_sq, change_sq, ratio_sq, zeros) reduction(max : v_max)
  for (int64_t i = 0; i < n; ++i) {
    const float scaled = to_float(g[i]);
    const float grad = scaled * grad_mul;
    const float old_p = p[i];
    // Not m + (1 - beta1)(grad - m): with beta1 = 0 that would keep a rounding error of m.
    const float new_m = h.beta1 * m[i] + h.beta1_new * grad;
    const float new_v = h.beta2 * v[i] + h.beta2_new * grad * grad;
    const float ratio = new_m / (__builtin_sqrtf(new_v) * h.v_correction + h.eps);
    const float new_p = old_p * h.decay - h.step_size * ratio;
    m[i] = new_m;
    v[i] = new_v;
    p[i] = new_p;
    if constexpr (!std::is_same_v<O, None>) from_float(new_p, out[i]);
    const float change = new_p - old_p;
    v_sum += new_v;
    const int32_t v_bits = bits_of<int32_t>(new_v) & 0x7fffffff;
    v_max = v_bits > v_max ? v_bits : v_max;
    p_sq += new_p * new_p;
    change_sq += change * change;
    ratio_sq += ratio * ratio;
    zeros += scaled == 0 ? 1 : 0;
  }
  sums[0] = v_sum;
  sums[1] = bits_of<float>(v_max);
  sums[2] = p_sq;
  sums[3] = change_sq;
  sums[4] = ratio_sq;
  sums[5] = zeros;
}

// A cloned function can't be a template: one name per pair of formats.
#define STEP(NAME, G, O)                                                                      \
  CKPT_CLONES void NAME(float* p, float* m, float* v, const G* g, O* out, int64_t n,          \
                        float grad_mul, const Hyper& h, double* sums) {                       \
    step_row(p, m, v, g, out, n, grad_mul, h, sums);                                          \
  }
STEP(step_float_none, float, None)
STEP(step_float_float, float, float)
STEP(step_float_bf16, float, Bf16)
STEP(step_float_half, float, Half)
STEP(step_bf16_none, Bf16, None)
STEP(step_bf16_bf16, Bf16, Bf16)
STEP(step_half_none, Half, None)
STEP(step_half_half, Half, Half)
#undef STEP

bool is_master(const Tensor& t, const Tensor& p) {
  return t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == p.numel();
}

void step_tensor(const Tensor& p, const Tensor& m, const Tensor& v, const Tensor& g,
                 const Tensor* out, float mul, const Hyper& hyper, double* total) {
  STD_TORCH_CHECK(is_master(p, p) && is_master(m, p) && is_master(v, p),
                  "adamw_flat_: p, m and v must be contiguous float32 of one length");
  STD_TORCH_CHECK(g.is_contiguous() && g.numel() == p.numel(),
                  "adamw_flat_: g must be contiguous and as long as p");
  STD_TORCH_CHECK(out == nullptr || (out->is_contiguous() && out->numel() == p.numel()),
                  "adamw_flat_: out must be contiguous and as long as p");
  const int64_t n = mul < 0 ? 0 : p.numel();  // all stays as it is
  auto sums = block_sums<6>(n);
  auto* const ps = static_cast<float*>(p.mutable_data_ptr());
  auto* const ms = static_cast<float*>(m.mutable_data_ptr());
  auto* const vs = static_cast<float*>(v.mutable_data_ptr());
  const auto over = [&](auto* gs, auto* outs, auto row) {
    for_blocks(n, [&](int64_t block, int64_t offset, int64_t length) {
      auto* const at = outs == nullptr ? nullptr : outs + offset;
      row(ps + offset, ms + offset, vs + offset, gs + offset, at, length, mul, hyper,
          sums[block].data());
    });
  };
  const ScalarType from = g.scalar_type();
  const ScalarType to = out != nullptr ? out->scalar_type() : ScalarType::Undefined;
  const void* const gs = g.const_data_ptr();
  void* const outs = out != nullptr ? out->mutable_data_ptr() : nullptr;
  const auto is = [&](ScalarType g_type, ScalarType out_type) {
    return from == g_type && to == out_type;
  };
  None* const none = nullptr;
  if (is(ScalarType::Float, ScalarType::Undefined)) {
    over(static_cast<const float*>(gs), none, step_float_none);
  } else if (is(ScalarType::Float, ScalarType::Float)) {
    over(static_cast<const float*>(gs), static_cast<float*>(outs), step_float_float);
  } else if (is(ScalarType::Float, ScalarType::BFloat16)) {
    over(static_cast<const float*>(gs), static_cast<Bf16*>(outs), step_float_bf16);
  } else if (is(ScalarType::Float, ScalarType::Half)) {
    over(static_cast<const float*>(gs), static_cast<Half*>(outs), step_float_half);
  } else if (is(ScalarType::BFloat16, ScalarType::Undefined)) {
    over(static_cast<const Bf16*>(gs), none, step_bf16_none);
  } else if (is(ScalarType::BFloat16, ScalarType::BFloat16)) {
    over(static_cast<const Bf16*>(gs), static_cast<Bf16*>(outs), step_bf16_bf16);
  } else if (is(ScalarType::Half, ScalarType::Undefined)) {
    over(static_cast<const Half*>(gs), none, step_half_none);
  } else if (is(ScalarType::Half, ScalarType::Half)) {
    over(static_cast<const Half*>(gs), static_cast<Half*>(outs), step_half_half);
  } else {
    STD_TORCH_CHECK(false, "adamw_flat_: g and out must be float32, or of one 16-bit format");
  }
  std::fill(total, total + 6, 0.0);
  for (const auto& sum : sums) {
    total[0] += sum[0];
    total[1] = sum[1] > total[1] || std::isnan(sum[1]) ? sum[1] : total[1];
    total[2] += sum[2];
    total[3] += sum[3];
    total[4] += sum[4];
    total[5] += sum[5];
  }
  total[4] *= double{hyper.m_correction} * hyper.m_correction;
}

using Tensors = std::vector<Tensor>;

Tensor adamw_flat_(Tensors p, Tensors m, Tensors v, Tensors g, Tensors out, const Tensor& grad_mul,
                   double lr, double beta1, double beta2, double eps, double weight_decay,
                   int64_t step) {
  const std::size_t count = p.size();
  STD_TORCH_CHECK(count > 0 && m.size() == count && v.size() == count && g.size() == count &&
                      (out.empty() || out.size() == count),
                  "adamw_flat_: p, m, v, g and out must be as many");
  STD_TORCH_CHECK(grad_mul.scalar_type() == ScalarType::Float && grad_mul.numel() == 1,
                  "adamw_flat_: grad_mul must be one float32");
  STD_TORCH_CHECK(step >= 1, "adamw_flat_: step counts from 1");
  const Hyper hyper = hyper_of(lr, beta1, beta2, eps, weight_decay, step);
  const float mul = *static_cast<const float*>(grad_mul.const_data_ptr());
  Tensor stats = new_doubles(p[0], {static_cast<int64_t>(count), 6});
  auto* const totals = static_cast<double*>(stats.mutable_data_ptr());
  for (std::size_t i = 0; i < count; ++i) {
    const Tensor* const to = out.empty() ? nullptr : &out[i];
    step_tensor(p[i], m[i], v[i], g[i], to, mul, hyper, totals + 6 * i);
  }
  return stats;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CPU, m) { m.impl("adamw_flat_", TORCH_BOX(&adamw_flat_)); }

}  // namespace ckptsurgeon
