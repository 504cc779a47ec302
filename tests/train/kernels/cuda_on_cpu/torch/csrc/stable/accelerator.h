// In place of torch's header: the one device is the CPU, and has no streams.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace torch::stable::accelerator {

using DeviceIndex = int32_t;

struct DeviceGuard {
  explicit DeviceGuard(DeviceIndex) {}
};

}  // namespace torch::stable::accelerator

inline AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
