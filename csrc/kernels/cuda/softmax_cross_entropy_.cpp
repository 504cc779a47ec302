// Binds softmax_cross_entropy_ for CUDA tensors.
#include "softmax_cross_entropy_.h"

#include "rows.h"

namespace ckptsurgeon {
namespace {

Tensor softmax_cross_entropy_(const Tensor& logits, const Tensor& targets, double scale) {
  const Rows at = rows_of(logits, "softmax_cross_entropy_: logits");
  STD_TORCH_CHECK(targets.is_contiguous() && targets.scalar_type() == ScalarType::Long &&
                      targets.numel() == at.rows &&
                      targets.get_device_index() == logits.get_device_index(),
                  "softmax_cross_entropy_: targets must be one int64 per row, on their device");
  const OnDevice device(logits);
  Tensor losses = torch::stable::new_empty(logits, {at.rows}, ScalarType::Float);
  check(launch_softmax_cross_entropy_(
      logits.mutable_data_ptr(), static_cast<const int64_t*>(targets.const_data_ptr()),
      static_cast<float*>(losses.mutable_data_ptr()), static_cast<float>(scale),
      format_of(logits, "softmax_cross_entropy_: logits"), at.rows, at.columns, device.stream()));
  return losses;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) {
  m.impl("softmax_cross_entropy_", TORCH_BOX(&softmax_cross_entropy_));
}

}  // namespace ckptsurgeon
