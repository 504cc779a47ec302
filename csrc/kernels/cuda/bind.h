// What the bindings of the CUDA kernels share: the tensor's device and stream, formats, errors.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "format.h"

namespace ckptsurgeon {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
}

// Makes the tensor's device current for the lifetime of the object.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor)
      : index_(tensor.get_device_index()), guard_(tensor.get_device_index()) {}

  cudaStream_t stream() const {
    void* stream = nullptr;
    // Not by a macro of torch: it has had three names since 2.10.
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream) == AOTI_TORCH_SUCCESS,
                    "torch has no current stream on this device");
    return static_cast<cudaStream_t>(stream);
  }

  int multiprocessors() const {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index_));
    return count;
  }

 private:
  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

inline Format format_of(const Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Format::kFloat;
    case ScalarType::BFloat16:
      return Format::kBf16;
    case ScalarType::Half:
      return Format::kHalf;
    default:
      STD_TORCH_CHECK(false, what, " must be float32, bfloat16 or float16");
  }
}

}  // namespace ckptsurgeon
