// What one AdamW step needs that is the same for every element. No torch header: nvcc reads it too.
#pragma once

#include <cmath>
#include <cstdint>

namespace ckptsurgeon {

// Computed in double, rounded to float once.
struct Hyper {
  float decay;         // 1 - lr * weight_decay
  float beta1;
  float beta1_new;     // 1 - beta1
  float beta2;
  float beta2_new;     // 1 - beta2
  float v_correction;  // 1 / sqrt(1 - beta2^step)
  float step_size;     // lr / (1 - beta1^step)
  float m_correction;  // 1 / (1 - beta1^step)
  float eps;
};

inline Hyper hyper_of(double lr, double beta1, double beta2, double eps, double weight_decay,
                      int64_t step) {
  const auto passed = static_cast<double>(step);
  return {
      static_cast<float>(1 - lr * weight_decay),
      static_cast<float>(beta1),
      static_cast<float>(1 - beta1),
      static_cast<float>(beta2),
      static_cast<float>(1 - beta2),
      static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, passed))),
      static_cast<float>(lr / (1 - std::pow(beta1, passed))),
      static_cast<float>(1 / (1 - std::pow(beta1, passed))),
      static_cast<float>(eps),
  };
}

}  // namespace ckptsurgeon
