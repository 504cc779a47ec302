// The numbers that dicts of one dict keep under the same key, as an optimizer keeps the step of each
// parameter, by the rules of ckptsurgeon/files/pickles/splice.py.

#pragma once

#include "scan.hpp"

namespace shards {

class Numbers {
 public:
  explicit Numbers(const Scan& scan) : scan_(scan) {}

  // Call `use(key, start, end)` with the opcode of the outer key and the bytes of the number, for
  // each value of the dict `holder` that is a dict with a number under `wanted`. Any other value is
  // passed over. False: something that Python must judge.
  template <typename Use>
  bool each(Value holder, Bytes wanted, Use use) const {
    if (holder >= scan_.stop || scan_.op(holder) != EMPTY_DICT) return false;
    return pairs(holder, [&](Value key, Value value) {
      const uint8_t op = scan_.op(key);
      const bool integer = op == BININT || op == BININT1 || op == BININT2;
      if (!integer && !(is_text(key) && is_ascii(key))) return false;
      if (scan_.op(value) != EMPTY_DICT) return true;
      Value found = 0;
      const bool plain = pairs(value, [&](Value name, Value number) {
        if (!is_text(name)) return false;
        if (text(name) != wanted) return true;
        const bool again = found != 0;
        found = number;
        return !again;
      });
      if (!plain) return false;
      const size_t size = found == 0 ? 0 : width(scan_.op(found));
      if (size == 0) return true;
      const uint8_t after = scan_.op(static_cast<Value>(found + size));
      if (after == BINPUT || after == LONG_BINPUT || after == MEMOIZE) return true;
      use(key, found, static_cast<Value>(found + size));
      return true;
    });
  }

  bool is_text(Value value) const {
    return scan_.op(value) == BINUNICODE || scan_.op(value) == SHORT_BINUNICODE;
  }

  Bytes text(Value value) const {
    uint32_t length = 0;
    const size_t bytes = scan_.op(value) == BINUNICODE ? 4 : 1;
    std::memcpy(&length, scan_.bytes(value + 1), bytes);
    return {reinterpret_cast<const char*>(scan_.bytes(value + 1)) + bytes, length};
  }

  bool is_ascii(Value value) const {
    for (const char letter : text(value))
      if (letter <= 0) return false;
    return true;
  }

  // Of BININT, BININT1 or BININT2.
  int64_t integer(Value value) const {
    const uint8_t* at = scan_.bytes(value + 1);
    if (scan_.op(value) == BININT1) return at[0];
    if (scan_.op(value) == BININT2) return at[0] | at[1] << 8;
    int32_t number;
    std::memcpy(&number, at, sizeof number);
    return number;
  }

 private:
  static size_t width(uint8_t op) {
    switch (op) {
      case BININT1: return 2;
      case BININT2: return 3;
      case BININT: return 5;
      case BINFLOAT: return 9;
      default: return 0;
    }
  }

  // Every key and value of a dict; a key that is read from the memo is what it stands for.
  template <typename Use>
  bool pairs(Value dict, Use use) const {
    auto found = std::lower_bound(
        scan_.grown.begin(), scan_.grown.end(), dict,
        [](const Filling& filling, Value wanted) { return filling.target < wanted; });
    for (; found != scan_.grown.end() && found->target == dict; ++found) {
      const uint8_t op = scan_.op(found->at);
      if (op != SETITEM && op != SETITEMS) return false;
      for (uint32_t k = op == SETITEMS; k + 1 < found->count; k += 2) {
        const Value key = scan_.made(scan_.operand(found->first + k));
        if (!use(key, scan_.operand(found->first + k + 1))) return false;
      }
    }
    return true;
  }

  const Scan& scan_;
};

}  // namespace shards
