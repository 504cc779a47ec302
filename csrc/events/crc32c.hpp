// CRC-32C of event file records: the processor's own instruction where it has one, else a table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace events {

inline uint32_t crc32c_by_table(const uint8_t* at, size_t size) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> entries{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
      entries[byte] = crc;
    }
    return entries;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (; size; --size) crc = table[(crc ^ *at++) & 0xFF] ^ (crc >> 8);
  return crc ^ 0xFFFFFFFFu;
}

#if defined(__x86_64__)

inline bool has_crc32c() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

__attribute__((target("sse4.2"))) inline uint32_t crc32c_by_instruction(const uint8_t* at,
                                                                        size_t size) {
  uint64_t crc = 0xFFFFFFFFu;
  for (; size >= 8; at += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  uint32_t rest = static_cast<uint32_t>(crc);
  if (size & 4) {
    uint32_t word;
    std::memcpy(&word, at, 4);
    rest = _mm_crc32_u32(rest, word);
    at += 4;
  }
  for (size &= 3; size; --size) rest = _mm_crc32_u8(rest, *at++);
  return rest ^ 0xFFFFFFFFu;
}

#elif defined(__aarch64__) && defined(__linux__)

inline bool has_crc32c() {
  static const bool has = getauxval(AT_HWCAP) & (1 << 7);  // HWCAP_CRC32
  return has;
}

__attribute__((target("+crc"))) inline uint32_t crc32c_by_instruction(const uint8_t* at,
                                                                      size_t size) {
  uint32_t crc = 0xFFFFFFFFu;
  for (; size >= 8; at += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    crc = __crc32cd(crc, word);
  }
  for (; size; --size) crc = __crc32cb(crc, *at++);
  return crc ^ 0xFFFFFFFFu;
}

#else

inline bool has_crc32c() { return false; }
inline uint32_t crc32c_by_instruction(const uint8_t* at, size_t size) {
  return crc32c_by_table(at, size);
}

#endif

// As a record frame stores it: rotated right by 15, plus a constant.
inline uint32_t masked(const uint8_t* at, size_t size) {
  const uint32_t crc = has_crc32c() ? crc32c_by_instruction(at, size) : crc32c_by_table(at, size);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

}  // namespace events
