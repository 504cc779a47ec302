// Binds causal_softmax for CUDA tensors.
#include "causal_softmax.h"

#include "rows.h"

namespace ckptsurgeon {
namespace {

// Queries are the last of the keys.
int64_t queries_of(const Tensor& scores) {
  const int64_t queries = scores.dim() > 1 ? scores.size(scores.dim() - 2) : 0;
  STD_TORCH_CHECK(scores.dim() > 1 && queries <= scores.size(scores.dim() - 1),
                  "causal_softmax: scores must be [..., queries, keys] with queries <= keys");
  return queries;
}

Tensor causal_softmax(const Tensor& scores, double scale) {
  const Rows at = rows_of(scores, "causal_softmax: scores");
  const int64_t queries = queries_of(scores);
  const OnDevice device(scores);
  Tensor y = torch::stable::empty_like(scores);
  check(launch_causal_softmax(scores.const_data_ptr(), y.mutable_data_ptr(),
                              static_cast<float>(scale),
                              format_of(scores, "causal_softmax: scores"), at.rows, queries,
                              at.columns, device.stream()));
  return y;
}

Tensor causal_softmax_backward(const Tensor& grad, const Tensor& y, double scale) {
  const Rows at = rows_of(y, "causal_softmax: probabilities");
  check_like(grad, y, y.numel(), "causal_softmax: grad");
  const int64_t queries = queries_of(y);
  const OnDevice device(y);
  Tensor dx = torch::stable::empty_like(y);
  check(launch_causal_softmax_backward(grad.const_data_ptr(), y.const_data_ptr(),
                                       dx.mutable_data_ptr(), static_cast<float>(scale),
                                       format_of(y, "causal_softmax: probabilities"), at.rows,
                                       queries, at.columns, device.stream()));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) {
  m.impl("causal_softmax", TORCH_BOX(&causal_softmax));
  m.impl("causal_softmax_backward", TORCH_BOX(&causal_softmax_backward));
}

}  // namespace ckptsurgeon
