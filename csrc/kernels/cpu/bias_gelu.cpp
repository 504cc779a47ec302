// bias_gelu on a CPU: t sigmoid(2 k0 t (1 + k1 t^2)), which is the tanh form of GELU, with t = x +
// bias; backward computes it again instead of keeping t.
#include "rows.h"

namespace ckptsurgeon {
namespace {

constexpr float kTwoK0 = 2 * 0.7978845608028654f;  // 2 sqrt(2 / pi)
constexpr float kK1 = 0.044715f;
constexpr float kFlat = 16;

CKPT_INLINE float gate(float t) {
  return 1.0f / (1.0f + exp_float(-kTwoK0 * t * (1 + kK1 * t * t)));
}

template <typename T>
CKPT_INLINE void forward(const T* __restrict x, const T* __restrict bias, T* __restrict y,
                         int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float t = to_float(x[i]) + to_float(bias[i]);
    from_float(t * gate(t), y[i]);
  }
}

template <typename T>
CKPT_INLINE void backward(const T* __restrict grad, const T* __restrict x,
                          const T* __restrict bias, T* __restrict dx, float* __restrict dbias,
                          int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float t = to_float(x[i]) + to_float(bias[i]);
    const float s = gate(t);
    // Beyond kFlat s is 0 or 1 and t may be as large as it likes: a clamped exp times t^3 is not 0.
    const float b = t < -kFlat ? -kFlat : t > kFlat ? kFlat : t;
    const float slope = s + b * s * (1 - s) * kTwoK0 * (1 + 3 * kK1 * b * b);
    const float d = to_float(grad[i]) * slope;
    from_float(d, dx[i]);
    dbias[i] += d;
  }
}

CKPT_CLONES void forward_row(const float* x, const float* bias, float* y, int64_t n) {
  forward(x, bias, y, n);
}
CKPT_CLONES void forward_row(const Bf16* x, const Bf16* bias, Bf16* y, int64_t n) {
  forward(x, bias, y, n);
}
CKPT_CLONES void forward_row(const Half* x, const Half* bias, Half* y, int64_t n) {
  forward(x, bias, y, n);
}
CKPT_CLONES void backward_row(const float* grad, const float* x, const float* bias, float* dx,
                              float* dbias, int64_t n) {
  backward(grad, x, bias, dx, dbias, n);
}
CKPT_CLONES void backward_row(const Bf16* grad, const Bf16* x, const Bf16* bias, Bf16* dx,
                              float* dbias, int64_t n) {
  backward(grad, x, bias, dx, dbias, n);
}
CKPT_CLONES void backward_row(const Half* grad, const Half* x, const Half* bias, Half* dx,
                              float* dbias, int64_t n) {
  backward(grad, x, bias, dx, dbias, n);
}

template <typename T>
void forward_rows(const Tensor& x, const Tensor& bias, Tensor& y, Rows at) {
  const T *in = read<T>(x), *b = read<T>(bias);
  T* out = write<T>(y);
  const int64_t n = at.columns;
  for_rows(at, [&](int64_t i) { forward_row(in + i * n, b, out + i * n, n); });
}

template <typename T>
void backward_rows(const Tensor& grad, const Tensor& x, const Tensor& bias, Tensor& dx,
                   Tensor& dbias, Rows at) {
  const T *g = read<T>(grad), *in = read<T>(x), *b = read<T>(bias);
  T* out = write<T>(dx);
  const int64_t n = at.columns;
  ColumnSums sums(at, n);
  sums.for_rows([&](int64_t i, float* sum) {
    backward_row(g + i * n, in + i * n, b, out + i * n, sum, n);
  });
  sums.total(0, n, write<T>(dbias));
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  const Rows at = rows_of(x, "bias_gelu: x");
  check_vector(bias, x, at.columns, "bias_gelu: bias");
  Tensor y = torch::stable::empty_like(x);
  by_dtype(x, "bias_gelu: x", [&](auto element) {
    forward_rows<decltype(element)>(x, bias, y, at);
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x,
                                              const Tensor& bias) {
  const Rows at = rows_of(x, "bias_gelu: x");
  check_same(grad, x, "bias_gelu: grad");
  check_vector(bias, x, at.columns, "bias_gelu: bias");
  Tensor dx = torch::stable::empty_like(x), dbias = torch::stable::empty_like(bias);
  by_dtype(x, "bias_gelu: x", [&](auto element) {
    backward_rows<decltype(element)>(grad, x, bias, dx, dbias, at);
  });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace ckptsurgeon
