// bias_dropout_add_layer_norm on a CPU: sum = residual + dropout(x + bias), out = LayerNorm(sum).
// A row stays in the cache between its passes.
#include "../philox.h"
#include "rows.h"

namespace ckptsurgeon {
namespace {

// `keep` has a factor for each element, 0 or 1 / (1 - p); without dropout it is null.
template <typename T>
CKPT_INLINE void forward(const T* __restrict x, const T* __restrict bias,
                         const T* __restrict residual, const T* __restrict weight,
                         const T* __restrict shift, const float* __restrict keep, float eps,
                         T* __restrict sum, T* __restrict out, float* stats, int64_t n) {
  float mean = 0;
  if (keep == nullptr) {
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < n; ++i) {
      from_float(to_float(x[i]) + to_float(bias[i]) + to_float(residual[i]), sum[i]);
      mean += to_float(sum[i]);
    }
  } else {
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < n; ++i) {
      const float kept = (to_float(x[i]) + to_float(bias[i])) * keep[i];
      from_float(kept + to_float(residual[i]), sum[i]);
      mean += to_float(sum[i]);
    }
  }
  mean /= static_cast<float>(n);
  float square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t i = 0; i < n; ++i) {
    const float t = to_float(sum[i]) - mean;
    square += t * t;
  }
  const float rstd = 1.0f / std::sqrt(square / static_cast<float>(n) + eps);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    from_float((to_float(sum[i]) - mean) * rstd * to_float(weight[i]) + to_float(shift[i]), out[i]);
  }
  stats[0] = mean;
  stats[1] = rstd;
}

// `columns` are the sums of three gradients: bias, weight, shift.
template <typename T>
CKPT_INLINE void backward(const T* __restrict grad_out, const T* __restrict grad_sum,
                          const T* __restrict sum, const float* stats, const T* __restrict weight,
                          const float* __restrict keep, T* __restrict dresidual, T* __restrict dx,
                          float* __restrict columns, int64_t n) {
  const float mean = stats[0], rstd = stats[1];
  float* __restrict dbias = columns;
  float* __restrict dweight = columns + n;
  float* __restrict dshift = columns + 2 * n;
  float a = 0, c = 0;
#pragma omp simd reduction(+ : a, c)
  for (int64_t i = 0; i < n; ++i) {
    const float g = to_float(grad_out[i]);
    const float normal = (to_float(sum[i]) - mean) * rstd;
    const float scaled = g * to_float(weight[i]);
    a += scaled;
    c += scaled * normal;
    dweight[i] += g * normal;
    dshift[i] += g;
  }
  a /= static_cast<float>(n);
  c /= static_cast<float>(n);
  const auto through = [&](int64_t i) __attribute__((always_inline)) {
    const float normal = (to_float(sum[i]) - mean) * rstd;
    return (to_float(grad_out[i]) * to_float(weight[i]) - a - normal * c) * rstd +
           to_float(grad_sum[i]);
  };
  if (keep == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float d = through(i);
      from_float(d, dresidual[i]);
      dbias[i] += d;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float d = through(i);
      from_float(d, dresidual[i]);
      from_float(d * keep[i], dx[i]);
      dbias[i] += d * keep[i];
    }
  }
}

CKPT_CLONES void forward_row(const float* x, const float* bias, const float* residual,
                             const float* weight, const float* shift, const float* keep, float eps,
                             float* sum, float* out, float* stats, int64_t n) {
  forward(x, bias, residual, weight, shift, keep, eps, sum, out, stats, n);
}
CKPT_CLONES void forward_row(const Bf16* x, const Bf16* bias, const Bf16* residual,
                             const Bf16* weight, const Bf16* shift, const float* keep, float eps,
                             Bf16* sum, Bf16* out, float* stats, int64_t n) {
  forward(x, bias, residual, weight, shift, keep, eps, sum, out, stats, n);
}
CKPT_CLONES void forward_row(const Half* x, const Half* bias, const Half* residual,
                             const Half* weight, const Half* shift, const float* keep, float eps,
                             Half* sum, Half* out, float* stats, int64_t n) {
  forward(x, bias, residual, weight, shift, keep, eps, sum, out, stats, n);
}
CKPT_CLONES void backward_row(const float* grad_out, const float* grad_sum, const float* sum,
                              const float* stats, const float* weight, const float* keep,
                              float* dresidual, float* dx, float* columns, int64_t n) {
  backward(grad_out, grad_sum, sum, stats, weight, keep, dresidual, dx, columns, n);
}
CKPT_CLONES void backward_row(const Bf16* grad_out, const Bf16* grad_sum, const Bf16* sum,
                              const float* stats, const Bf16* weight, const float* keep,
                              Bf16* dresidual, Bf16* dx, float* columns, int64_t n) {
  backward(grad_out, grad_sum, sum, stats, weight, keep, dresidual, dx, columns, n);
}
CKPT_CLONES void backward_row(const Half* grad_out, const Half* grad_sum, const Half* sum,
                              const float* stats, const Half* weight, const float* keep,
                              Half* dresidual, Half* dx, float* columns, int64_t n) {
  backward(grad_out, grad_sum, sum, stats, weight, keep, dresidual, dx, columns, n);
}

CKPT_CLONES void keep_row(float* __restrict keep, int64_t row, int64_t n, uint32_t seed,
                          uint32_t threshold, float factor) {
  const int64_t half = (n + 1) / 2;  // a pair of words serves one column of each half
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const Philox words = philox(static_cast<uint32_t>(i), static_cast<uint32_t>(row), seed);
    keep[i] = words.first >= threshold ? factor : 0.0f;
    keep[i + half] = words.second >= threshold ? factor : 0.0f;
  }
}

// The dropout of a call: p, and the seed of its mask.
class Dropout {
 public:
  Dropout(double p, const std::optional<Tensor>& seed) : p_(p) {
    STD_TORCH_CHECK(p >= 0 && p < 1, "bias_dropout_add_layer_norm: p must be in [0, 1)");
    if (p == 0) return;
    STD_TORCH_CHECK(seed.has_value() && seed->numel() == 1 &&
                        seed->scalar_type() == ScalarType::Long,
                    "bias_dropout_add_layer_norm: dropout needs a seed, one int64");
    seed_ = static_cast<uint32_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
  }

  // The factors of this row, valid until the thread asks for the next ones; null for p = 0.
  const float* keep(int64_t row, int64_t n) const {
    if (p_ == 0) return nullptr;
    thread_local std::vector<float> factors;
    factors.resize(static_cast<size_t>(n + 1));
    keep_row(factors.data(), row, n, seed_, static_cast<uint32_t>(p_ * 0x1p32),
             static_cast<float>(1 / (1 - p_)));
    return factors.data();
  }

 private:
  double p_;
  uint32_t seed_ = 0;
};

template <typename T>
void forward_rows(const Tensor& x, const Tensor& bias, const Tensor& residual,
                  const Tensor& weight, const Tensor& shift, const Dropout& dropout, float eps,
                  Tensor& out, Tensor& sum, Tensor& stats, Rows at) {
  const T *in = read<T>(x), *b = read<T>(bias), *r = read<T>(residual), *w = read<T>(weight),
          *s = read<T>(shift);
  T *o = write<T>(out), *kept = write<T>(sum);
  float* st = write<float>(stats);
  const int64_t n = at.columns;
  for_rows(at, [&](int64_t i) {
    forward_row(in + i * n, b, r + i * n, w, s, dropout.keep(i, n), eps, kept + i * n, o + i * n,
                st + 2 * i, n);
  });
}

std::tuple<Tensor, Tensor, Tensor> bias_dropout_add_layer_norm(
    const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& weight,
    const Tensor& shift, double eps, double p, const std::optional<Tensor>& seed) {
  const Rows at = rows_of(x, "bias_dropout_add_layer_norm: x");
  check_same(residual, x, "bias_dropout_add_layer_norm: residual");
  check_vector(bias, x, at.columns, "bias_dropout_add_layer_norm: bias");
  check_vector(weight, x, at.columns, "bias_dropout_add_layer_norm: weight");
  check_vector(shift, x, at.columns, "bias_dropout_add_layer_norm: shift");
  const Dropout dropout(p, seed);
  Tensor out = torch::stable::empty_like(x), sum = torch::stable::empty_like(x);
  Tensor stats = torch::stable::new_empty(x, {at.rows, 2}, ScalarType::Float);
  const float e = static_cast<float>(eps);
  by_dtype(x, "bias_dropout_add_layer_norm: x", [&](auto element) {
    forward_rows<decltype(element)>(x, bias, residual, weight, shift, dropout, e, out, sum, stats,
                                    at);
  });
  return {out, sum, stats};
}

template <typename T>
void backward_rows(const Tensor& grad_out, const Tensor& grad_sum, const Tensor& sum,
                   const Tensor& stats, const Tensor& weight, const Dropout& dropout,
                   Tensor& dresidual, Tensor& dx, Tensor& dbias, Tensor& dweight, Tensor& dshift,
                   Rows at) {
  const T *g = read<T>(grad_out), *gs = read<T>(grad_sum), *s = read<T>(sum), *w = read<T>(weight);
  const float* st = read<float>(stats);
  T *dr = write<T>(dresidual), *d = write<T>(dx);
  const int64_t n = at.columns;
  ColumnSums sums(at, 3 * n);
  sums.for_rows([&](int64_t i, float* columns) {
    const float* keep = dropout.keep(i, n);
    backward_row(g + i * n, gs + i * n, s + i * n, st + 2 * i, w, keep, dr + i * n,
                 keep == nullptr ? nullptr : d + i * n, columns, n);
  });
  sums.total(0, n, write<T>(dbias));
  sums.total(n, n, write<T>(dweight));
  sums.total(2 * n, n, write<T>(dshift));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bias_dropout_add_layer_norm_backward(
    const Tensor& grad_out, const Tensor& grad_sum, const Tensor& sum, const Tensor& stats,
    const Tensor& weight, double p, const std::optional<Tensor>& seed) {
  const Rows at = rows_of(sum, "bias_dropout_add_layer_norm: sum");
  check_same(grad_out, sum, "bias_dropout_add_layer_norm: grad_out");
  check_same(grad_sum, sum, "bias_dropout_add_layer_norm: grad_sum");
  check_vector(weight, sum, at.columns, "bias_dropout_add_layer_norm: weight");
  STD_TORCH_CHECK(stats.is_contiguous() && stats.scalar_type() == ScalarType::Float &&
                      stats.numel() == 2 * at.rows,
                  "bias_dropout_add_layer_norm: stats must be two float32 per row");
  const Dropout dropout(p, seed);
  Tensor dresidual = torch::stable::empty_like(sum);
  Tensor dx = p == 0 ? torch::stable::new_empty(sum, {0}) : torch::stable::empty_like(sum);
  Tensor dbias = torch::stable::empty_like(weight), dweight = torch::stable::empty_like(weight),
         dshift = torch::stable::empty_like(weight);
  by_dtype(sum, "bias_dropout_add_layer_norm: sum", [&](auto element) {
    backward_rows<decltype(element)>(grad_out, grad_sum, sum, stats, weight, dropout, dresidual, dx,
                                     dbias, dweight, dshift, at);
  });
  return {dx, dresidual, dbias, dweight, dshift};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CPU, m) {
  m.impl("bias_dropout_add_layer_norm", TORCH_BOX(&bias_dropout_add_layer_norm));
  m.impl("bias_dropout_add_layer_norm_backward", TORCH_BOX(&bias_dropout_add_layer_norm_backward));
}

}  // namespace ckptsurgeon
