// How the binding calls the CUDA kernel of adamw_flat_: a table of the tensors of one launch, which
// goes to the device with the launch's arguments (4 KiB in all). `out` may be null, of all or of
// none; `stats` is six doubles for each tensor, `partials` room for so many as the function below
// says; `grad_mul` lies on the device, so that nobody waits for the gradient norm.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../adamw_hyper.h"
#include "format.h"

namespace ckptsurgeon {

struct AdamwTable {
  static constexpr int kRoom = 32;
  float* p[kRoom];
  float* m[kRoom];
  float* v[kRoom];
  const void* g[kRoom];
  void* out[kRoom];
  int64_t n[kRoom];
  int first_block[kRoom + 1];
  int count = 0;
};

// Fills in `first_block`.
int64_t partial_sums_of_adamw(AdamwTable& table, int multiprocessors);

cudaError_t launch_adamw_flat(const AdamwTable& table, Format g_format, Format out_format,
                              const float* grad_mul, Hyper hyper, double* partials, double* stats,
                              cudaStream_t stream);

}  // namespace ckptsurgeon
