// How the binding calls the CUDA kernel of grad_norm_check: a table of the tensors of one launch,
// which goes to the device with the launch's arguments (4 KiB in all). `totals` is two doubles for
// each tensor, `partials` room for so many as the function below says.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.h"

namespace ckptsurgeon {

struct NormTable {
  static constexpr int kRoom = 32;
  const void* g[kRoom];
  int64_t n[kRoom];
  int first_block[kRoom + 1];
  int count = 0;
};

// Fills in `first_block`.
int64_t partial_sums_of_grad_norm(NormTable& table, int multiprocessors);

cudaError_t launch_grad_norm_check(const NormTable& table, Format format, double* partials,
                                   double* totals, cudaStream_t stream);

}  // namespace ckptsurgeon
