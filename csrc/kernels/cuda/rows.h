// What the bindings of the CUDA kernels over rows share: checks, and sums in the input's dtype.
#pragma once

#include "bind.h"

namespace ckptsurgeon {

// A matrix of `rows` rows of `columns` elements, as it lies in memory.
struct Rows {
  int64_t rows, columns;
};

inline Rows rows_of(const Tensor& tensor, const char* what) {
  STD_TORCH_CHECK(tensor.is_contiguous(), what, " must be contiguous");
  STD_TORCH_CHECK(tensor.dim() > 0, what, " must have a last dimension");
  const int64_t columns = tensor.size(tensor.dim() - 1);
  return {columns == 0 ? 0 : tensor.numel() / columns, columns};
}

// `tensor` must have `numel` elements, and be of the same kind and in the same place as `like`.
inline void check_like(const Tensor& tensor, const Tensor& like, int64_t numel, const char* what) {
  STD_TORCH_CHECK(tensor.is_contiguous(), what, " must be contiguous");
  STD_TORCH_CHECK(tensor.numel() == numel, what, " has another number of elements");
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), what, " must have the input's dtype");
  STD_TORCH_CHECK(tensor.get_device_index() == like.get_device_index(), what,
                  " must be on the input's device");
}

// `n` of the float sums, from number `from`, in the dtype of `like`.
inline Tensor rounded(const Tensor& sums, int64_t from, int64_t n, const Tensor& like) {
  Tensor out = torch::stable::empty_like(like);
  return torch::stable::copy_(out, torch::stable::narrow(const_cast<Tensor&>(sums), 0, from, n));
}

}  // namespace ckptsurgeon
