// Binds grad_norm_check for CUDA tensors.
#include "grad_norm_check.h"

#include <vector>

#include "bind.h"

namespace ckptsurgeon {
namespace {

Tensor grad_norm_check(std::vector<Tensor> grads) {
  STD_TORCH_CHECK(!grads.empty(), "grad_norm_check: there must be a gradient");
  for (const Tensor& grad : grads) {
    STD_TORCH_CHECK(grad.is_contiguous() && grad.scalar_type() == grads[0].scalar_type() &&
                        grad.get_device_index() == grads[0].get_device_index(),
                    "grad_norm_check: grad must be contiguous, and all of one format and device");
  }
  const OnDevice device(grads[0]);
  const Format format = format_of(grads[0], "grad_norm_check: grad");
  const int multiprocessors = device.multiprocessors();
  const auto count = static_cast<int64_t>(grads.size());
  Tensor totals = torch::stable::new_empty(grads[0], {count, 2}, ScalarType::Double);
  for (int64_t first = 0; first < count; first += NormTable::kRoom) {
    NormTable table;
    for (int64_t i = first; i < count && table.count < NormTable::kRoom; ++i, ++table.count) {
      table.g[table.count] = grads[i].const_data_ptr();
      table.n[table.count] = grads[i].numel();
    }
    const int64_t room = partial_sums_of_grad_norm(table, multiprocessors);
    Tensor partials = torch::stable::new_empty(grads[0], {room}, ScalarType::Double);
    check(launch_grad_norm_check(table, format, static_cast<double*>(partials.mutable_data_ptr()),
                                 static_cast<double*>(totals.mutable_data_ptr()) + 2 * first,
                                 device.stream()));
  }
  return totals;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ckptsurgeon, CUDA, m) {
  m.impl("grad_norm_check", TORCH_BOX(&grad_norm_check));
}

}  // namespace ckptsurgeon
