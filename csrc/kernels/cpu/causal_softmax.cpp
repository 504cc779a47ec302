// causal_softmax on a CPU: reads only what a query may see, writes zeros over the rest.
#include "rows.h"

namespace ckptsurgeon {
namespace {

// e^x, and 0 where exp_float would clamp: a score of -inf has no share at all.
CKPT_INLINE float exp_or_zero(float x) { return x < -87.3f ? 0.0f : exp_float(x); }

template <typename T>
CKPT_INLINE void forward(const T* __restrict x, T* __restrict y, float* __restrict e, float scale,
                         int64_t seen, int64_t n) {
  float most = -INFINITY;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < seen; ++i) {
    const float t = to_float(x[i]) * scale;
    most = t > most ? t : most;
  }
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < seen; ++i) {
    e[i] = exp_or_zero(to_float(x[i]) * scale - most);
    total += e[i];
  }
  const float share = 1.0f / total;
#pragma omp simd
  for (int64_t i = 0; i < seen; ++i) from_float(e[i] * share, y[i]);
#pragma omp simd
  for (int64_t i = seen; i < n; ++i) from_float(0.0f, y[i]);
}

template <typename T>
CKPT_INLINE void backward(const T* __restrict grad, const T* __restrict y, T* __restrict dx,
                          float scale, int64_t seen, int64_t n) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < seen; ++i) dot += to_float(grad[i]) * to_float(y[i]);
#pragma omp simd
  for (int64_t i = 0; i < seen; ++i) {
    from_float((to_float(grad[i]) - dot) * to_float(y[i]) * scale, dx[i]);
  }
#pragma omp simd
  for (int64_t i = seen; i < n; ++i) from_float(0.0f, dx[i]);
}

CKPT_CLONES void forward_row(const float* x, float* y, float* e, float scale, int64_t seen,
                             int64_t n) {
  forward(x, y, e, scale, seen, n);
}
CKPT_CLONES void forward_row(const Bf16* x, Bf16* y, float* e, float scale, int64_t seen,
                             int64_t n) {
  forward(x, y, e, scale, seen, n);
}
CKPT_CLONES void forward_row(const Half* x, Half* y, float* e, float scale, int64_t seen,
                             int64_t n) {
  forward(x, y, e, scale, seen, n);
}
CKPT_CLONES void backward_row(const float* grad, const float* y, float* dx, float scale,
                              int64_t seen, int64_t n) {
  backward(grad, y, dx, scale, seen, n);
}
CKPT_CLONES void backward_row(const Bf16* grad, const Bf16* y, Bf16* dx, float scale, int64_t seen,
                              int64_t n) {
  backward(grad, y, dx, scale, seen, n);
}
CKPT_CLONES void backward_row(const Half* grad, const Half* y, Half* dx, float scale, int64_t seen,
                              int64_t n) {
  backward(grad, y, dx, scale, seen, n);
}

// Queries are the last of the keys: row i of q sees the first i + 1 + k - q of k keys.
struct Scores {
  Rows at;
  int64_t queries;

  explicit Scores(const Tensor& scores)
      : at(rows_of(scores, "causal_softmax: scores")),
        queries(scores.dim() > 1 ? scores.size(scores.dim() - 2) : 0) {
    STD_TORCH_CHECK(scores.dim() > 1 && queries <= at.columns,
                    "causal_softmax: scores must be [..., queries, keys] with queries <= keys");
  }
  int64_t seen(int64_t row) const { return row % queries + 1 + at.columns - queries; }
};

template <typename T>
void forward_rows(const Tensor& scores, Tensor& y, float scale, const Scores& s) {
  const T* in = read<T>(scores);
  T* out = write<T>(y);
  const int64_t n = s.at.columns;
  for_rows(s.at, [&](int64_t i) {
    thread_local std::vector<float> e;
    e.resize(static_cast<size_t>(n));
    forward_row(in + i * n, out + i * n, e.data(), scale, s.seen(i), n);
  });
}

template <typename T>
void backward_rows(const Tensor& grad, const Tensor& y, Tensor& dx, float scale, const Scores& s) {
  const T *g = read<T>(grad), *p = read<T>(y);
  T* out = write<T>(dx);
  const int64_t n = s.at.columns;
  for_rows(s.at, [&](int64_t i) {
    backward_row(g + i * n, p + i * n, out + i * n, scale, s.seen(i), n);
  });
}

Tensor causal_softmax(const Tensor& scores, double scale) {
  const Scores s(scores);
  Tensor y = torch::stable::empty_like(scores);
  by_dtype(scores, "causal_softmax: scores", [&](auto element) {
    forward_rows<decltype(element)>(scores, y, static_cast<float>(scale), s);
  });
  return y;
}

Tensor causal_softmax_backward(const Tensor& grad, const Tensor& y, double scale) {
  const Scores s(y);
  check_same(grad, y, "causal_softmax: grad");
  Tensor dx = torch::stable::empty_like(y);
  by_dtype(y, "causal_softmax: probabilities", [&](auto element) {
    backward_rows<decltype(element)>(grad, y, dx, static_cast<float>(scale), s);
  });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CPU, m) {
  m.impl("causal_softmax", TORCH_BOX(&causal_softmax));
  m.impl("causal_softmax_backward", TORCH_BOX(&causal_softmax_backward));
}

}  // namespace ckptsurgeon
