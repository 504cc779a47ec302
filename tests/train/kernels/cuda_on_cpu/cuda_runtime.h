// As much of CUDA as csrc/kernels/cuda uses, on one thread of a CPU. Every thread of a block is a
// fiber; a warp runs as far as it gets before the next one does, so one is far ahead of the others
// after each barrier. EMULATED_ORDER (forward, reverse, shuffled) says which, and in which order the
// blocks run: where a barrier is missing, or sums are taken in the order in which blocks come, one of
// them gives another result.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static  // blocks run one after the other

using std::isnan;
using std::max;

enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
using cudaStream_t = void*;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaDeviceGetAttribute(int* count, cudaDeviceAttr, int) {
  *count = 1;
  return cudaSuccess;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx{0}, blockIdx{0}, blockDim{1}, gridDim{1};

namespace emulated {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 1 << 16;

struct Barrier {
  unsigned arrived = 0, generation = 0;
};
struct Warp {
  Barrier barrier;
  char slots[kWarp][8];
};
struct Fiber {
  ucontext_t start;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

inline jmp_buf scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier block;
inline unsigned current;
inline bool progress;
inline const std::function<void()>* kernel;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated block (%u, %u): %s\n", blockIdx.x, blockIdx.y, what);
  std::exit(70);
}

// Back to the scheduler. A jump asks nothing of the system, which swapcontext does twice a switch.
inline void yield() {
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier, unsigned members) {
  progress = true;
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

// A fiber runs a thread of each block; it never returns.
inline void enter() {
  while (true) {
    (*kernel)();
    fibers[current].done = true;
    yield();
  }
}

// Let a fiber go on until it yields.
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.stack != nullptr) _longjmp(fiber.here, 1);
  fiber.stack.reset(new char[kStack]);
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = kStack;
  makecontext(&fiber.start, enter, 0);
  setcontext(&fiber.start);
}

inline std::vector<unsigned> order(unsigned count) {
  const char* const named = std::getenv("EMULATED_ORDER");
  const std::string wanted = named == nullptr ? "forward" : named;
  std::vector<unsigned> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0u);
  if (wanted == "reverse") std::reverse(numbers.begin(), numbers.end());
  if (wanted == "shuffled") std::shuffle(numbers.begin(), numbers.end(), std::mt19937{1});
  return numbers;
}

// Let the threads of one warp go on until each is done or waits for another warp.
inline bool run_warp(unsigned warp) {
  const auto threads = static_cast<unsigned>(fibers.size());
  bool any = false;
  do {
    progress = false;
    for (unsigned number = warp * kWarp; number < std::min(threads, (warp + 1) * kWarp); ++number) {
      if (fibers[number].done) continue;
      current = number;
      threadIdx.x = number;
      resume(fibers[number]);
      progress |= fibers[number].done;
    }
    any |= progress;
  } while (progress);
  return any;
}

inline void run_block(const std::vector<unsigned>& order) {
  block = {};
  warps.assign(order.size(), Warp{});
  for (Fiber& fiber : fibers) fiber.done = false;
  bool any = true;
  while (any) {
    any = false;
    for (const unsigned warp : order) any |= run_warp(warp);
  }
  for (const Fiber& fiber : fibers) {
    if (!fiber.done) fail("its threads wait for threads that are gone");
  }
}

// What name<<<grid, threads, 0, stream>>>(arguments) is rewritten to.
inline void launch(dim3 grid, unsigned threads, const std::function<void()>& body) {
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || threads == 0 || threads > 1024) {
    std::fprintf(stderr, "no such launch: grid (%u, %u), %u threads\n", grid.x, grid.y, threads);
    std::exit(70);
  }
  const std::vector<unsigned> warp_order = order((threads + kWarp - 1) / kWarp);
  if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);
  kernel = &body;
  gridDim = grid;
  blockDim = {threads};
  for (const unsigned number : order(grid.x * grid.y)) {
    blockIdx = {number % grid.x, number / grid.x};
    run_block(warp_order);
  }
}

template <typename T>
void put(T value) {
  std::memcpy(warps[current / kWarp].slots[current % kWarp], &value, sizeof(T));
  wait(warps[current / kWarp].barrier, kWarp);
}
template <typename T>
T get(unsigned lane) {
  T value;
  std::memcpy(&value, warps[current / kWarp].slots[lane], sizeof(T));
  return value;
}
inline void release() { wait(warps[current / kWarp].barrier, kWarp); }

}  // namespace emulated

inline void __syncthreads() { emulated::wait(emulated::block, blockDim.x); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int i) {
  if (mask != ~0u) emulated::fail("a shuffle among some threads of a warp");
  emulated::put(x);
  const T other = emulated::get<T>(emulated::current % emulated::kWarp ^ static_cast<unsigned>(i));
  emulated::release();
  return other;
}
// For the tests that seed a bug: no kernel has one.
template <typename T>
T atomicAdd(T* at, T x) {
  const T old = *at;
  *at += x;
  return old;
}
template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
