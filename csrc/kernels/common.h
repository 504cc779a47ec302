// What the CPU kernels share: a copy of a row function per instruction set, number formats, exp, and
// sums over blocks that do not depend on the number of threads.
//
// Write a kernel as a *row function* (plain loops over `__restrict` pointers, `CKPT_CLONES` on a
// non-template function) that a lambda calls per block: the bodies of lambdas are not cloned.
// Never -ffast-math: it deletes the tests for NaN.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

// The loader picks the AVX-512, AVX2 or baseline copy of a row function (ifunc).
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 12
#define CKPT_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CKPT_CLONES __attribute__((noinline))
#endif
#define CKPT_INLINE static inline __attribute__((always_inline))

namespace ckptsurgeon {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename To, typename From>
CKPT_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// A 16-bit number as it lies in memory.
struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

CKPT_INLINE float to_float(float x) { return x; }
CKPT_INLINE float to_float(Bf16 x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
CKPT_INLINE float to_float(Half x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  // 2^112 moves the exponent bias from 15 to 127, exactly, for subnormals too.
  const uint32_t finite = bits_of<uint32_t>(bits_of<float>(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return bits_of<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

// Rounded to nearest even, as torch does; NaN stays NaN.
CKPT_INLINE void from_float(float x, float& out) { out = x; }
CKPT_INLINE void from_float(float x, Bf16& out) {
  const uint32_t u = bits_of<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  out.bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}
CKPT_INLINE void from_float(float x, Half& out) {
  const uint32_t u = bits_of<uint32_t>(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the unit of a half is 2^-24: adding 1/2 leaves that many units in the low bits.
  const uint32_t small = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t h = magnitude < 0x38800000u ? small : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;  // 65520 and more round to infinity
  h = magnitude > 0x7f800000u ? 0x7e00u : h;
  out.bits = static_cast<uint16_t>(h | ((u >> 16) & 0x8000u));
}

// e^x within 2 ulp on [-87.3, 88.3], clamped outside (Cephes' expf polynomial).
CKPT_INLINE float exp_float(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  const float n = __builtin_rintf(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return y * bits_of<float>((static_cast<int32_t>(n) + 127) << 23);
}

// Elements per block: three or four rows of it lie in the L1 cache; one partial sum per block.
constexpr int64_t kBlock = 4096;

// Call `span(block, offset, length)` for the blocks of `n` elements, some at once, on torch's threads.
template <typename Span>
void for_spans(int64_t n, const Span& span) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  torch::stable::parallel_for(0, blocks, 8, [&](int64_t first, int64_t last) {
    const int64_t offset = first * kBlock;
    span(first, offset, std::min(last * kBlock, n) - offset);
  });
}

// Call `row(block, offset, length)` for every block of `n` elements, on torch's threads.
template <typename Row>
void for_blocks(int64_t n, const Row& row) {
  for_spans(n, [&](int64_t block, int64_t offset, int64_t left) {
    for (; left > 0; ++block, offset += kBlock, left -= kBlock) {
      row(block, offset, std::min(kBlock, left));
    }
  });
}

// One array of `N` partial sums per block, so that the total is the same for any number of threads.
template <std::size_t N>
std::vector<std::array<double, N>> block_sums(int64_t n) {
  return std::vector<std::array<double, N>>((n + kBlock - 1) / kBlock);
}

inline Tensor new_doubles(const Tensor& like, std::initializer_list<int64_t> size) {
  return torch::stable::new_empty(like, size, ScalarType::Double);
}

}  // namespace ckptsurgeon
