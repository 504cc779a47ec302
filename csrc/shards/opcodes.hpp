// How long the opcodes of pickle are, for readers that walk over them.

#pragma once

#include <algorithm>
#include <array>

#include "scan.hpp"

namespace shards {

// The bytes of each opcode that has always as many, with what belongs to it.
constexpr std::array<uint8_t, 256> kWidths = [] {
  std::array<uint8_t, 256> out{};
  for (const Op op : {NONE, NEWTRUE, NEWFALSE, EMPTY_DICT, EMPTY_LIST, EMPTY_SET, EMPTY_TUPLE, MEMOIZE,
                      MARK, TUPLE, TUPLE1, TUPLE2, TUPLE3, STACK_GLOBAL, REDUCE, NEWOBJ, SETITEM,
                      SETITEMS, APPEND, APPENDS, ADDITEMS, BUILD, POP, STOP})
    out[op] = 1;
  for (const Op op : {BININT1, BINPUT, BINGET}) out[op] = 2;
  for (const Op op : {BININT, LONG_BINPUT, LONG_BINGET}) out[op] = 5;
  out[BININT2] = 3;
  out[BINFLOAT] = out[FRAME] = 9;
  return out;
}();

// The bytes of the opcode at `i` with what belongs to it; 0 for one that is none or does not fit.
inline size_t width(const uint8_t* data, size_t size, size_t i, const Limits& limits) {
  const auto number = [&](size_t bytes) -> uint64_t {
    uint64_t out = 0;
    if (i + 1 + bytes > size) return UINT32_MAX;
    std::memcpy(&out, data + i + 1, bytes);
    return std::min<uint64_t>(out, UINT32_MAX);
  };
  uint64_t out = kWidths[data[i]];
  if (out != 0) return i + out <= size ? out : 0;
  switch (data[i]) {
    case SHORT_BINUNICODE: case SHORT_BINBYTES: out = 2 + number(1); break;
    case BINUNICODE: case BINBYTES: out = 5 + number(4); break;
    case BINUNICODE8: case BINBYTES8: out = 9 + number(8); break;
    case LONG1: out = 2 + number(1); break;
    case GLOBAL: {
      size_t at = i;
      for (int line = 0; line < 2; ++line) {
        const size_t end = std::min<size_t>(size, at + 2 + limits.name);
        const void* found = at + 1 < end ? std::memchr(data + at + 1, '\n', end - at - 1) : nullptr;
        if (found == nullptr) return 0;
        at = static_cast<size_t>(static_cast<const uint8_t*>(found) - data);
      }
      out = at + 1 - i;
      break;
    }
    default: return 0;
  }
  return i + out <= size ? out : 0;
}

}  // namespace shards
