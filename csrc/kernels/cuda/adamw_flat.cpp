// Binds adamw_flat_ for CUDA tensors.
#include "adamw_flat.h"

#include <optional>

#include "bind.h"

namespace ckptsurgeon {
namespace {

bool is_like(const Tensor& t, const Tensor& p) {
  return t.is_contiguous() && t.numel() == p.numel() &&
         t.get_device_index() == p.get_device_index();
}

bool is_master(const Tensor& t, const Tensor& p) {
  return t.scalar_type() == ScalarType::Float && is_like(t, p);
}

float* floats(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

Tensor adamw_flat_(Tensor p, Tensor m, Tensor v, const Tensor& g, std::optional<Tensor> out,
                   const Tensor& grad_mul, double lr, double beta1, double beta2, double eps,
                   double weight_decay, int64_t step) {
  STD_TORCH_CHECK(is_master(p, p) && is_master(m, p) && is_master(v, p),
                  "adamw_flat_: p, m and v must be contiguous float32 of one length and device");
  STD_TORCH_CHECK(is_like(g, p),
                  "adamw_flat_: g must be contiguous, as long as p and on its device");
  STD_TORCH_CHECK(!out || is_like(*out, p),
                  "adamw_flat_: out must be contiguous, as long as p and on its device");
  STD_TORCH_CHECK(grad_mul.scalar_type() == ScalarType::Float && grad_mul.numel() == 1 &&
                      grad_mul.get_device_index() == p.get_device_index(),
                  "adamw_flat_: grad_mul must be one float32 on the device of p");
  STD_TORCH_CHECK(step >= 1, "adamw_flat_: step counts from 1");
  const OnDevice device(p);
  const Hyper hyper = hyper_of(lr, beta1, beta2, eps, weight_decay, step);
  const int multiprocessors = device.multiprocessors();
  Tensor partials = torch::stable::new_empty(p, {partial_sums_of_adamw(p.numel(), multiprocessors)},
                                             ScalarType::Double);
  Tensor stats = torch::stable::new_empty(p, {6}, ScalarType::Double);
  check(launch_adamw_flat(
      floats(p), floats(m), floats(v), g.const_data_ptr(), format_of(g, "adamw_flat_: g"),
      out ? out->mutable_data_ptr() : nullptr,
      out ? format_of(*out, "adamw_flat_: out") : Format::kFloat, p.numel(),
      static_cast<const float*>(grad_mul.const_data_ptr()), hyper,
      static_cast<double*>(partials.mutable_data_ptr()),
      static_cast<double*>(stats.mutable_data_ptr()), multiprocessors, device.stream()));
  return stats;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) { m.impl("adamw_flat_", TORCH_BOX(&adamw_flat_)); }

}  // namespace ckptsurgeon
