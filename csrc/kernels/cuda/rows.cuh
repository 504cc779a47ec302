// What the CUDA kernels over the rows of a matrix share: one block of threads per row, and sums
// over the columns of gradients.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "format.h"

namespace ckptsurgeon {

__device__ __forceinline__ float block_max(float x) {
  return block_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

// How many neighbours a thread takes at once: 16 bytes of them, or one where `columns` or a pointer
// does not allow it.
template <typename T>
constexpr int kWide = 16 / sizeof(T);
template <int N, typename T, typename... Pointers>
bool fits(int64_t columns, const T* first, const Pointers*... others) {
  const uintptr_t bits = (reinterpret_cast<uintptr_t>(first) | ... |
                          reinterpret_cast<uintptr_t>(others));
  return columns % N == 0 && bits % (N * sizeof(T)) == 0;
}
template <int N>
using Width = std::integral_constant<int, N>;

// Call `what(i, first)` for each pack of N columns of this thread, of which i is the first column;
// `first` says that it is the thread's first pack.
template <int N, typename What>
__device__ __forceinline__ void each_pack(int64_t columns, const What& what) {
  int64_t i = N * threadIdx.x;
  if (i < columns) what(i, true);
  for (i += N * kThreads; i < columns; i += N * kThreads) what(i, false);
}

// A row that is read several times: its first pack stays in registers, which is all of a row of up
// to 2048 elements of 16 bits; the others come from a cache.
template <typename T, int N>
struct Row {
  const T* from;
  Pack<T, N> held;

  __device__ __forceinline__ Pack<T, N> read(int64_t i, bool first) {
    return keep(load<N>(from + i), first);
  }
  __device__ __forceinline__ Pack<T, N> keep(const Pack<T, N>& pack, bool first) {
    if (first) held = pack;
    return pack;
  }
  __device__ __forceinline__ Pack<T, N> again(int64_t i, bool first) const {
    return first ? held : load<N>(from + i);
  }
};

// The rows of a matrix are cut into strips; a thread adds up one column of a strip, and a second
// kernel adds the strips, always in this order: gradients are the same bits on every GPU.
constexpr int64_t kMostStrips = 256;
constexpr int64_t kLeastRows = 32;

inline int64_t rows_of_strip(int64_t rows) {
  const int64_t even = (rows + kMostStrips - 1) / kMostStrips;
  return even < kLeastRows ? kLeastRows : even;
}
inline int64_t strips_of(int64_t rows) {
  const int64_t each = rows_of_strip(rows);
  return (rows + each - 1) / each;
}

// A thread that adds up columns takes four neighbours, or one.
constexpr int kColumns = 4;

// All blocks in x, which alone may have more than 65535: `Strip` tells each its place.
inline dim3 column_grid(int64_t rows, int64_t columns, int wide) {
  const int64_t across = (columns + kThreads * wide - 1) / (kThreads * wide);
  return dim3(static_cast<unsigned>(across * strips_of(rows)));
}

// The rows from `first` to `end` of the columns that a thread adds up, the first of which is
// `column`; past the last one for none.
struct Strip {
  int64_t column, number, first, end;

  __device__ __forceinline__ Strip(int64_t rows, int64_t columns, int64_t each, int wide) {
    const int64_t across = (columns + kThreads * wide - 1) / (kThreads * wide);
    column = (blockIdx.x % across * kThreads + threadIdx.x) * wide;
    number = blockIdx.x / across;
    first = number * each;
    end = first + each < rows ? first + each : rows;
  }
};

// Where the sums of up to three groups of columns go.
template <typename T>
struct Sums {
  T *first, *second = nullptr, *third = nullptr;
};

// out[i] = the sum of partials [strips, n] over the strips, of n = groups * columns columns. A warp
// adds up a share of the strips of 32 columns; the first warp adds the shares.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_strips(const float* __restrict__ partials, Sums<T> out, int64_t strips, int64_t n,
               int64_t columns) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float shares[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t i = int64_t{blockIdx.x} * 32 + lane;
  const int64_t each = (strips + kWarps - 1) / kWarps;
  const int64_t end = (warp + 1) * each < strips ? (warp + 1) * each : strips;
  float share = 0;
  if (i < n) {
    for (int64_t strip = warp * each; strip < end; ++strip) share += partials[strip * n + i];
  }
  shares[warp][lane] = share;
  __syncthreads();
  if (warp > 0 || i >= n) return;
  float total = 0;
  for (int w = 0; w < kWarps; ++w) total += shares[w][lane];
  const int64_t group = i / columns;
  T* const to = group == 0 ? out.first : group == 1 ? out.second : out.third;
  from_float(total, to[i % columns]);
}

template <typename T>
cudaError_t launch_add_strips(const float* partials, Sums<T> out, int groups, int64_t rows,
                              int64_t columns, cudaStream_t stream) {
  const int64_t n = groups * columns;
  if (n == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((n + 31) / 32);
  add_strips<<<blocks, kThreads, 0, stream>>>(partials, out, strips_of(rows), n, columns);
  return cudaGetLastError();
}

// Call `launch` with a null pointer of the format's element type.
template <typename Launch>
void by_format(Format format, const Launch& launch) {
  switch (format) {
    case Format::kFloat:
      return launch(static_cast<float*>(nullptr));
    case Format::kBf16:
      return launch(static_cast<__nv_bfloat16*>(nullptr));
    case Format::kHalf:
      return launch(static_cast<__half*>(nullptr));
  }
}

}  // namespace ckptsurgeon
