// Reads memory as fast as one core can: the ceiling of a kernel that only reads.
#include <cstdint>

#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
static uint64_t add_up(const uint64_t* words, int64_t count) {
  // In several places at once, as one core asks for more lines then than in one.
  const int64_t each = count / 4;
  uint64_t total = 0;
  int64_t done = 0;
  for (; done + 128 <= each; done += 128) {
    for (int stream = 0; stream < 4; ++stream) {
      const uint64_t* const run = words + stream * each + done;
      for (int line = 0; line < 16; ++line) __builtin_prefetch(run + 512 + 8 * line);
      uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < 128; ++i) sum += run[i];
      total += sum;
    }
  }
  for (int stream = 0; stream < 4; ++stream) {
    for (int64_t i = done; i < each; ++i) total += words[stream * each + i];
  }
  for (int64_t i = 4 * each; i < count; ++i) total += words[i];
  return total;
}

extern "C" __attribute__((visibility("default"))) uint64_t read_all(const uint64_t* words,
                                                                     int64_t count) {
  return add_up(words, count);
}
