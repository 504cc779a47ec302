// What the kernels over the rows of a matrix share: their threads, and sums over columns that do
// not depend on the number of threads.
#pragma once

#include "../common.h"

namespace ckptsurgeon {

constexpr int64_t kGrain = 16384;  // elements below which another thread costs more than it gives

// A matrix of `rows` rows of `columns` elements, as it lies in memory.
struct Rows {
  int64_t rows, columns;
};

// `tensor` as rows of its last dimension. Kernels read and write it as it lies.
inline Rows rows_of(const Tensor& tensor, const char* what) {
  STD_TORCH_CHECK(tensor.is_contiguous(), what, " must be contiguous");
  STD_TORCH_CHECK(tensor.dim() > 0, what, " must have a last dimension");
  const int64_t columns = tensor.size(tensor.dim() - 1);
  return {columns == 0 ? 0 : tensor.numel() / columns, columns};
}

inline void check_same(const Tensor& tensor, const Tensor& like, const char* what) {
  STD_TORCH_CHECK(tensor.is_contiguous(), what, " must be contiguous");
  STD_TORCH_CHECK(tensor.numel() == like.numel(), what, " must have as many elements as the input");
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), what, " must have the input's dtype");
}

inline void check_vector(const Tensor& tensor, const Tensor& like, int64_t n, const char* what) {
  STD_TORCH_CHECK(tensor.is_contiguous(), what, " must be contiguous");
  STD_TORCH_CHECK(tensor.numel() == n, what, " must have one element per column");
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), what, " must have the input's dtype");
}

// Call `body` with a value of the tensor's element type.
template <typename Body>
void by_dtype(const Tensor& tensor, const char* what, const Body& body) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::BFloat16:
      return body(Bf16{});
    case ScalarType::Half:
      return body(Half{});
    default:
      STD_TORCH_CHECK(false, what, " must be float32, bfloat16 or float16");
  }
}

template <typename T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <typename T>
T* write(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Call `row(i)` for every row, on torch's threads.
template <typename Row>
void for_rows(Rows at, const Row& row) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, at.columns));
  torch::stable::parallel_for(0, at.rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) row(i);
  });
}

// Sums over the rows for `width` columns: every block of rows adds up its own, and the blocks are
// added in their order. There are as many blocks whatever the number of threads.
class ColumnSums {
 public:
  ColumnSums(Rows at, int64_t width)
      : at_(at), width_(width), per_block_(std::max<int64_t>(1, (at.rows + kMost - 1) / kMost)) {
    blocks_ = (at.rows + per_block_ - 1) / per_block_;
    sums_.resize(static_cast<size_t>(blocks_ * width), 0.0f);
  }

  // Call `row(i, sums)` for every row; `sums` are the `width` sums of its block.
  template <typename Row>
  void for_rows(const Row& row) {
    const int64_t elements = std::max<int64_t>(1, per_block_ * at_.columns);
    const int64_t grain = std::max<int64_t>(1, kGrain / elements);
    torch::stable::parallel_for(0, blocks_, grain, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t end = std::min(at_.rows, (block + 1) * per_block_);
        for (int64_t i = block * per_block_; i < end; ++i) row(i, &sums_[block * width_]);
      }
    });
  }

  // Columns `from` to `from + n` of the total, rounded once.
  template <typename T>
  void total(int64_t from, int64_t n, T* out) const {
    std::vector<float> total(static_cast<size_t>(n), 0.0f);
    for (int64_t block = 0; block < blocks_; ++block) {
      const float* const sums = sums_.data() + block * width_ + from;
      for (int64_t i = 0; i < n; ++i) total[i] += sums[i];
    }
    for (int64_t i = 0; i < n; ++i) from_float(total[i], out[i]);
  }

 private:
  static constexpr int64_t kMost = 64;
  Rows at_;
  int64_t width_, per_block_, blocks_;
  std::vector<float> sums_;
};

}  // namespace ckptsurgeon
