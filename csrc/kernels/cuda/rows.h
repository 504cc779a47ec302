// What the bindings of the CUDA kernels over rows share: shapes and checks.
#pragma once

#include "bind.h"

namespace ckptsurgeon {

// A matrix of `rows` rows of `columns` elements, as it lies in memory.
struct Rows {
  int64_t rows, columns;
};

// One block of threads per row: CUDA has no more blocks in x.
constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;

inline Rows rows_of(const Tensor& tensor, const char* what) {
  STD_TORCH_CHECK(tensor.is_contiguous(), what, " must be contiguous");
  STD_TORCH_CHECK(tensor.dim() > 0, what, " must have a last dimension");
  const int64_t columns = tensor.size(tensor.dim() - 1);
  const int64_t rows = columns == 0 ? 0 : tensor.numel() / columns;
  STD_TORCH_CHECK(rows <= kMostRows, what, " has more than 2^31 - 1 rows");
  return {rows, columns};
}

// `tensor` must have `numel` elements, and be of the same kind and in the same place as `like`.
inline void check_like(const Tensor& tensor, const Tensor& like, int64_t numel, const char* what) {
  STD_TORCH_CHECK(tensor.is_contiguous(), what, " must be contiguous");
  STD_TORCH_CHECK(tensor.numel() == numel, what, " has another number of elements");
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), what, " must have the input's dtype");
  STD_TORCH_CHECK(tensor.get_device_index() == like.get_device_index(), what,
                  " must be on the input's device");
}

}  // namespace ckptsurgeon
