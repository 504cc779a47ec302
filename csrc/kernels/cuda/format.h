// The number formats that a CUDA kernel is told at run time.
#pragma once

namespace ckptsurgeon {

enum class Format : int { kFloat, kBf16, kHalf };

}  // namespace ckptsurgeon
