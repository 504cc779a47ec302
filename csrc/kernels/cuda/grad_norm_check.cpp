// Binds grad_norm_check for CUDA tensors.
#include "grad_norm_check.h"

#include "bind.h"

namespace ckptsurgeon {
namespace {

Tensor grad_norm_check(const Tensor& grad) {
  STD_TORCH_CHECK(grad.is_contiguous(), "grad_norm_check: grad must be contiguous");
  const OnDevice device(grad);
  Tensor total = torch::stable::new_zeros(grad, {2}, ScalarType::Double);
  check(launch_grad_norm_check(grad.const_data_ptr(), format_of(grad, "grad_norm_check: grad"),
                               grad.numel(), static_cast<double*>(total.mutable_data_ptr()),
                               device.multiprocessors(), device.stream()));
  return total;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) {
  m.impl("grad_norm_check", TORCH_BOX(&grad_norm_check));
}

}  // namespace ckptsurgeon
