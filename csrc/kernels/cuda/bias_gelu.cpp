// Binds bias_gelu for CUDA tensors.
#include "bias_gelu.h"

#include <tuple>

#include "rows.h"

namespace ckptsurgeon {
namespace {

Tensor bias_gelu(const Tensor& x, const Tensor& bias) {
  const Rows at = rows_of(x, "bias_gelu: x");
  check_like(bias, x, at.columns, "bias_gelu: bias");
  const OnDevice device(x);
  Tensor y = torch::stable::empty_like(x);
  check(launch_bias_gelu(x.const_data_ptr(), bias.const_data_ptr(), y.mutable_data_ptr(),
                         format_of(x, "bias_gelu: x"), at.rows, at.columns,
                         device.multiprocessors(), device.stream()));
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x,
                                              const Tensor& bias) {
  const Rows at = rows_of(x, "bias_gelu: x");
  check_like(grad, x, x.numel(), "bias_gelu: grad");
  check_like(bias, x, at.columns, "bias_gelu: bias");
  const OnDevice device(x);
  Tensor dx = torch::stable::empty_like(x), dbias = torch::stable::empty_like(bias);
  Tensor partials = torch::stable::new_empty(x, {partial_sums_of_bias_gelu(at.rows, at.columns)},
                                             ScalarType::Float);
  check(launch_bias_gelu_backward(grad.const_data_ptr(), x.const_data_ptr(), bias.const_data_ptr(),
                                  dx.mutable_data_ptr(), dbias.mutable_data_ptr(),
                                  static_cast<float*>(partials.mutable_data_ptr()),
                                  format_of(x, "bias_gelu: x"), at.rows, at.columns,
                                  device.stream()));
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace ckptsurgeon
