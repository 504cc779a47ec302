// Philox2x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the word
// of an element is a function of its row, its column and the seed, so backward draws it again.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CKPT_PHILOX __host__ __device__ __forceinline__
#else
#define CKPT_PHILOX static inline __attribute__((always_inline))
#endif

namespace ckptsurgeon {

struct Philox {
  uint32_t first, second;
};

CKPT_PHILOX Philox philox(uint32_t column, uint32_t row, uint32_t seed) {
  uint32_t c0 = column, c1 = row;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product = uint64_t{0xd256d193u} * c0;
    c0 = static_cast<uint32_t>(product >> 32) ^ seed ^ c1;
    c1 = static_cast<uint32_t>(product);
    seed += 0x9e3779b9u;
  }
  return {c0, c1};
}

}  // namespace ckptsurgeon
