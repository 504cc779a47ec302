// Binds bias_dropout_add_layer_norm for CUDA tensors. The seed of the mask lies on the host.
#include "bias_dropout_add_layer_norm.h"

#include <optional>
#include <tuple>

#include "rows.h"

namespace ckptsurgeon {
namespace {

DropoutMask mask_of(double p, const std::optional<Tensor>& seed) {
  STD_TORCH_CHECK(p >= 0 && p < 1, "bias_dropout_add_layer_norm: p must be in [0, 1)");
  if (p == 0) return {};
  STD_TORCH_CHECK(seed.has_value() && seed->is_cpu() && seed->numel() == 1 &&
                      seed->scalar_type() == ScalarType::Long,
                  "bias_dropout_add_layer_norm: dropout needs a seed, one int64 on the CPU");
  return {static_cast<uint32_t>(*static_cast<const int64_t*>(seed->const_data_ptr())),
          static_cast<uint32_t>(p * 0x1p32), static_cast<float>(1 / (1 - p))};
}

std::tuple<Tensor, Tensor, Tensor> bias_dropout_add_layer_norm(
    const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& weight,
    const Tensor& shift, double eps, double p, const std::optional<Tensor>& seed) {
  const Rows at = rows_of(x, "bias_dropout_add_layer_norm: x");
  check_like(residual, x, x.numel(), "bias_dropout_add_layer_norm: residual");
  check_like(bias, x, at.columns, "bias_dropout_add_layer_norm: bias");
  check_like(weight, x, at.columns, "bias_dropout_add_layer_norm: weight");
  check_like(shift, x, at.columns, "bias_dropout_add_layer_norm: shift");
  const OnDevice device(x);
  Tensor out = torch::stable::empty_like(x), sum = torch::stable::empty_like(x);
  Tensor stats = torch::stable::new_empty(x, {at.rows, 2}, ScalarType::Float);
  check(launch_bias_dropout_add_layer_norm(
      x.const_data_ptr(), bias.const_data_ptr(), residual.const_data_ptr(),
      weight.const_data_ptr(), shift.const_data_ptr(), out.mutable_data_ptr(),
      sum.mutable_data_ptr(), static_cast<float*>(stats.mutable_data_ptr()),
      static_cast<float>(eps), mask_of(p, seed), format_of(x, "bias_dropout_add_layer_norm: x"),
      at.rows, at.columns, device.stream()));
  return {out, sum, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bias_dropout_add_layer_norm_backward(
    const Tensor& grad_out, const Tensor& grad_sum, const Tensor& sum, const Tensor& stats,
    const Tensor& weight, double p, const std::optional<Tensor>& seed) {
  const Rows at = rows_of(sum, "bias_dropout_add_layer_norm: sum");
  const int64_t n = at.columns;
  check_like(grad_out, sum, sum.numel(), "bias_dropout_add_layer_norm: grad_out");
  check_like(grad_sum, sum, sum.numel(), "bias_dropout_add_layer_norm: grad_sum");
  check_like(weight, sum, n, "bias_dropout_add_layer_norm: weight");
  STD_TORCH_CHECK(stats.is_contiguous() && stats.scalar_type() == ScalarType::Float &&
                      stats.numel() == 2 * at.rows,
                  "bias_dropout_add_layer_norm: stats must be two float32 per row");
  const OnDevice device(sum);
  Tensor dresidual = torch::stable::empty_like(sum);
  Tensor dx = p == 0 ? torch::stable::new_empty(sum, {0}) : torch::stable::empty_like(sum);
  Tensor dbias = torch::stable::empty_like(weight), dweight = torch::stable::empty_like(weight);
  Tensor dshift = torch::stable::empty_like(weight);
  Tensor partials = torch::stable::new_empty(sum, {partial_sums_of_layer_norm(at.rows, n)},
                                             ScalarType::Float);
  check(launch_bias_dropout_add_layer_norm_backward(
      grad_out.const_data_ptr(), grad_sum.const_data_ptr(), sum.const_data_ptr(),
      static_cast<const float*>(stats.const_data_ptr()), weight.const_data_ptr(),
      dresidual.mutable_data_ptr(), p == 0 ? nullptr : dx.mutable_data_ptr(),
      dbias.mutable_data_ptr(), dweight.mutable_data_ptr(), dshift.mutable_data_ptr(),
      static_cast<float*>(partials.mutable_data_ptr()), mask_of(p, seed),
      format_of(sum, "bias_dropout_add_layer_norm: sum"), at.rows, n, device.stream()));
  return {dx, dresidual, dbias, dweight, dshift};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) {
  m.impl("bias_dropout_add_layer_norm", TORCH_BOX(&bias_dropout_add_layer_norm));
  m.impl("bias_dropout_add_layer_norm_backward", TORCH_BOX(&bias_dropout_add_layer_norm_backward));
}

}  // namespace ckptsurgeon
