// softmax_cross_entropy_ on a CPU: a row of logits becomes its gradient where it lies; the row of
// a large vocabulary stays in the L2 cache between its passes.
#include "rows.h"

namespace ckptsurgeon {
namespace {

// The loss of one row; x becomes (softmax(x) - onehot(target)) scale. `e` may be x itself.
template <typename T>
CKPT_INLINE float loss_and_gradient(T* x, float* e, int64_t target, float scale,
                                    int64_t n) {
  const float wanted = to_float(x[target]);
  float most = -INFINITY;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) most = to_float(x[i]) > most ? to_float(x[i]) : most;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    e[i] = exp_float(to_float(x[i]) - most);
    total += e[i];
  }
  const float share = scale / total;
  const float at_target = e[target] * share - scale;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) from_float(e[i] * share, x[i]);
  from_float(at_target, x[target]);
  return std::log(total) + most - wanted;
}

// In float the row itself holds e^x between the passes: there is no second array to fetch.
CKPT_CLONES float loss_row(float* x, float*, int64_t target, float scale, int64_t n) {
  return loss_and_gradient(x, x, target, scale, n);
}
CKPT_CLONES float loss_row(Bf16* x, float* e, int64_t target, float scale, int64_t n) {
  return loss_and_gradient(x, e, target, scale, n);
}
CKPT_CLONES float loss_row(Half* x, float* e, int64_t target, float scale, int64_t n) {
  return loss_and_gradient(x, e, target, scale, n);
}

Tensor softmax_cross_entropy_(const Tensor& logits, const Tensor& targets, double scale) {
  const Rows at = rows_of(logits, "softmax_cross_entropy_: logits");
  STD_TORCH_CHECK(targets.is_contiguous() && targets.scalar_type() == ScalarType::Long &&
                      targets.numel() == at.rows,
                  "softmax_cross_entropy_: targets must be one int64 per row");
  const int64_t n = at.columns;
  const auto* wanted = static_cast<const int64_t*>(targets.const_data_ptr());
  for (int64_t i = 0; i < at.rows; ++i) {
    STD_TORCH_CHECK(wanted[i] >= 0 && wanted[i] < n, "softmax_cross_entropy_: target ", wanted[i],
                    " is not one of ", n, " classes");
  }
  Tensor losses = torch::stable::new_empty(logits, {at.rows}, ScalarType::Float);
  float* loss = write<float>(losses);
  const float s = static_cast<float>(scale);
  by_dtype(logits, "softmax_cross_entropy_: logits", [&](auto element) {
    using T = decltype(element);
    auto* x = static_cast<T*>(logits.mutable_data_ptr());
    for_rows(at, [&](int64_t i) {
      thread_local std::vector<float> e;
      if constexpr (sizeof(T) < sizeof(float)) e.resize(static_cast<size_t>(n));
      loss[i] = loss_row(x + i * n, e.data(), wanted[i], s, n);
    });
  });
  return losses;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CPU, m) {
  m.impl("softmax_cross_entropy_", TORCH_BOX(&softmax_cross_entropy_));
}

}  // namespace ckptsurgeon
