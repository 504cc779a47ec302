// Binds grad_norm_check for CUDA tensors.
#include "grad_norm_check.h"

#include "bind.h"

namespace ckptsurgeon {
namespace {

Tensor grad_norm_check(const Tensor& grad) {
  STD_TORCH_CHECK(grad.is_contiguous(), "grad_norm_check: grad must be contiguous");
  const OnDevice device(grad);
  const int multiprocessors = device.multiprocessors();
  const int64_t room = partial_sums_of_grad_norm(grad.numel(), multiprocessors);
  Tensor partials = torch::stable::new_empty(grad, {room}, ScalarType::Double);
  Tensor total = torch::stable::new_empty(grad, {2}, ScalarType::Double);
  check(launch_grad_norm_check(grad.const_data_ptr(), format_of(grad, "grad_norm_check: grad"),
                               grad.numel(), static_cast<double*>(partials.mutable_data_ptr()),
                               static_cast<double*>(total.mutable_data_ptr()), multiprocessors,
                               device.stream()));
  return total;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) {
  m.impl("grad_norm_check", TORCH_BOX(&grad_norm_check));
}

}  // namespace ckptsurgeon
