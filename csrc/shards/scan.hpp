// One pass over the opcodes of a pickle, by the rules of ckptsurgeon/files/pickles/scan.py.
//
// What it accepts, Python accepts, with the same places; whatever it refuses, Python judges. A value
// is known by the offset of the opcode that makes it. Nothing is decoded, imported or called.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "column.hpp"

namespace shards {

using Bytes = std::string_view;

// Names and numbers of Python's `pickle` module.
enum Op : uint8_t {
  PROTO = 0x80, STOP = 0x2E, FRAME = 0x95, MARK = 0x28, POP = 0x30, POP_MARK = 0x31,
  BINPUT = 0x71, LONG_BINPUT = 0x72, MEMOIZE = 0x94, BINGET = 0x68, LONG_BINGET = 0x6A,
  GLOBAL = 0x63, STACK_GLOBAL = 0x93, EMPTY_DICT = 0x7D, EMPTY_LIST = 0x5D, EMPTY_SET = 0x8F,
  EMPTY_TUPLE = 0x29, TUPLE = 0x74, TUPLE1 = 0x85, TUPLE2 = 0x86, TUPLE3 = 0x87,
  FROZENSET = 0x91, SETITEM = 0x73, SETITEMS = 0x75, APPEND = 0x61, APPENDS = 0x65,
  ADDITEMS = 0x90, REDUCE = 0x52, NEWOBJ = 0x81, NEWOBJ_EX = 0x92, BUILD = 0x62,
  BINPERSID = 0x51, NONE = 0x4E, NEWTRUE = 0x88, NEWFALSE = 0x89, BININT = 0x4A, BININT1 = 0x4B,
  BININT2 = 0x4D, LONG1 = 0x8A, LONG4 = 0x8B, BINFLOAT = 0x47, BINUNICODE = 0x58,
  SHORT_BINUNICODE = 0x8C, BINUNICODE8 = 0x8D, BINBYTES = 0x42, SHORT_BINBYTES = 0x43,
  BINBYTES8 = 0x8E, BYTEARRAY8 = 0x96, BINSTRING = 0x54, SHORT_BINSTRING = 0x55,
};

using Value = uint32_t;  // MAX_BYTES is below 2^32

struct Limits {
  uint64_t opcodes, depth, integer, name, key, long_keys;
};

// Operands [first, first + count) of the opcode at `at`; after a mark, that is the first of them.
struct Node {
  Value at;
  uint32_t first, count;
};

// An opcode that fills the container, or builds the object, `target`.
struct Filling {
  Value target, at;
  uint32_t first, count;
};

class Scan {
 public:
  Scan(const uint8_t* data, size_t size, const Limits& limits)
      : data_(data),
        size_(size),
        limits_(limits) {}

  // False: something that Python must judge.
  bool walk() {
    if (size_ < 2 || size_ > UINT32_MAX || limits_.depth >= UINT16_MAX) return false;
    const size_t likely = std::min<size_t>(size_ / 4, limits_.opcodes);  // by what torch writes
    operands_.reserve(likely);
    for (auto* column : {&memo, &puts, &gets}) column->reserve(likely / 2);
    heights_.reserve(likely / 2);
    nodes.reserve(likely / 2);
    size_t i = 2;
    for (uint64_t count = 0; count < limits_.opcodes; ++count) {
      if (i >= size_) return false;
      if (data_[i] == STOP) return finish(i);
      i = step(i);
      if (i == 0) return false;
    }
    return false;
  }

  uint8_t op(Value value) const { return data_[value]; }
  const uint8_t* bytes(Value value) const { return data_ + value; }
  Value operand(uint32_t k) const { return operands_[k]; }

  const Node* parts(Value value) const {
    const auto found = std::lower_bound(nodes.begin(), nodes.end(), value,
                                        [](const Node& node, Value at) { return node.at < at; });
    return found != nodes.end() && found->at == value ? &*found : nullptr;
  }

  Value start(Value value) const {
    while (const Node* node = parts(value)) value = operands_[node->first];
    return value;
  }

  static bool is_get(uint8_t op) { return op == BINGET || op == LONG_BINGET; }

  uint32_t index_of_get(Value get) const {
    return op(get) == BINGET ? data_[get + 1] : u32(get + 1);
  }

  // The value that a GET stands for, one step.
  Value made(Value value) const {
    return is_get(op(value)) ? memo[index_of_get(value)] : value;
  }

  Value root = 0;
  size_t stop = 0;
  uint64_t long_keys = 0;
  Column<Node> nodes;                  // ascending by `at`
  std::vector<Filling> grown, built;   // ascending by `target`, then `at`
  Column<Value> memo;                  // by index; 0 where it is not set
  Column<Value> puts, gets;            // ascending
  std::vector<std::pair<Value, uint64_t>> frames;
  std::vector<std::pair<Value, Value>> gaps;  // end, start
  bool counted = false;                // a MEMOIZE numbers the memo by counting

 private:
  uint32_t u32(size_t at) const {
    uint32_t out;
    std::memcpy(&out, data_ + at, sizeof out);
    return out;
  }

  // The offset after the opcode at `i`; 0 to refuse.
  [[gnu::always_inline]] size_t step(size_t i) {
    switch (data_[i]) {
      case NONE: case NEWTRUE: case NEWFALSE: case EMPTY_DICT: case EMPTY_LIST: case EMPTY_SET:
      case EMPTY_TUPLE: return push(i, 1);
      case BININT1: return push(i, 2);
      case BININT2: return push(i, 3);
      case BININT: return push(i, 5);
      case BINFLOAT: return push(i, 9);
      case BINPUT: return i + 1 < size_ ? put(i, data_[i + 1], 2) : 0;
      case LONG_BINPUT: return i + 5 <= size_ ? put(i, u32(i + 1), 5) : 0;
      case MEMOIZE: counted = true; return put(i, set_, 1);
      case BINGET: return i + 1 < size_ ? get(i, data_[i + 1], 2) : 0;
      case LONG_BINGET: return i + 5 <= size_ ? get(i, u32(i + 1), 5) : 0;
      case MARK:
        marks_.push_back(static_cast<uint32_t>(stack_.size()));
        return marks_.size() > limits_.depth ? 0 : push(i, 1);
      case SHORT_BINUNICODE: case SHORT_BINBYTES: case SHORT_BINSTRING: return sized(i, 1);
      case BINUNICODE: case BINBYTES: case BINSTRING: return sized(i, 4);
      case BINUNICODE8: case BINBYTES8: case BYTEARRAY8: return sized(i, 8);
      case LONG1: return integer(i, 1);
      case LONG4: return integer(i, 4);
      case TUPLE1: case BINPERSID: return make(i, 1);
      case TUPLE2: case STACK_GLOBAL: case REDUCE: case NEWOBJ: return make(i, 2);
      case TUPLE3: case NEWOBJ_EX: return make(i, 3);
      case TUPLE: case FROZENSET: return make(i, kMarked);
      case SETITEM: return fill(i, 2);
      case APPEND: case BUILD: return fill(i, 1);
      case SETITEMS: case APPENDS: case ADDITEMS: return fill(i, kMarked);
      case GLOBAL: return global(i);
      case FRAME: return frame(i);
      case POP: case POP_MARK: return pop(i);
      default: return 0;
    }
  }

  static constexpr size_t kMarked = 0;

  // A value on the stack. `height` is 1 above the levels below it, if it has any; `memo` is 1 above
  // its memo index.
  struct Item {
    Value at;
    uint32_t memo;
    uint16_t height;
  };

  [[gnu::always_inline]] size_t push(size_t i, size_t size, uint16_t height = 0) {
    stack_.push_back({static_cast<Value>(i), 0, height});
    return i + size;
  }

  [[gnu::always_inline]] size_t put(size_t i, size_t index, size_t size) {
    if (index >= i || stack_.empty()) return 0;
    if (index == memo.size()) {  // nearly always
      memo.push_back(0);
      heights_.push_back(0);
    } else if (index > memo.size()) {
      memo.resize(index + 1);
      heights_.resize(index + 1);
    }
    Item& item = stack_.back();
    if (memo[index] != 0 || item.memo != 0) return 0;  // torch sets no value twice
    memo[index] = item.at;
    heights_[index] = item.height;
    item.memo = static_cast<uint32_t>(index + 1);
    ++set_;
    puts.push_back(static_cast<Value>(i));
    return i + size;
  }

  [[gnu::always_inline]] size_t get(size_t i, size_t index, size_t size) {
    if (index >= memo.size() || memo[index] == 0) return 0;
    gets.push_back(static_cast<Value>(i));
    return push(i, size, heights_[index]);
  }

  // The bytes of the value at `i`, whose length has `width` bytes; false if it does not fit.
  [[gnu::always_inline]] bool fits(size_t i, size_t width, uint64_t& length) const {
    if (i + 1 + width > size_) return false;
    length = 0;
    std::memcpy(&length, data_ + i + 1, width);
    return length <= size_ - (i + 1 + width);
  }

  [[gnu::always_inline]] size_t sized(size_t i, size_t width) {
    uint64_t length;
    return fits(i, width, length) ? push(i, 1 + width + length) : 0;
  }

  size_t integer(size_t i, size_t width) {
    uint64_t length;
    if (!fits(i, width, length) || length > limits_.integer) return 0;
    // No level, but to be looked at if it is a key.
    return push(i, 1 + width + length, length >= 8);
  }

  // Take the operands off the stack; `first` is where they were.
  [[gnu::always_inline]] bool take(size_t count, bool holder, Node& node, size_t& first,
                                   uint16_t& levels) {
    if (count == kMarked) {
      if (marks_.empty()) return false;
      first = marks_.back();
      marks_.pop_back();
    } else {
      if (stack_.size() < count) return false;
      first = stack_.size() - count;
    }
    const size_t floor = marks_.empty() ? 0 : marks_.back() + 1;
    if (first < floor + holder) return false;
    node.first = static_cast<uint32_t>(operands_.size());
    node.count = static_cast<uint32_t>(stack_.size() - first);
    levels = 1;
    for (const Item* item = stack_.begin() + first; item != stack_.end(); ++item) {
      operands_.push_back(item->at);
      levels = std::max(levels, item->height);
    }
    return levels <= limits_.depth;
  }

  [[gnu::always_inline]] size_t make(size_t i, size_t count) {
    Node node{static_cast<Value>(i), 0, 0};
    size_t from;
    uint16_t levels;
    if (!take(count, false, node, from, levels)) return 0;
    stack_.resize(from);
    const Value first = node.count ? operands_[node.first] : 0;
    switch (data_[i]) {
      case REDUCE: case NEWOBJ: case NEWOBJ_EX: {
        const uint8_t maker = op(made(first));
        if (maker != GLOBAL && maker != STACK_GLOBAL && maker != BINPERSID) return 0;
        break;
      }
      case STACK_GLOBAL:
        if (!is_text(made(first)) || !is_text(made(operands_[node.first + 1]))) return 0;
        break;
      case FROZENSET:
        if (!keys(node.first, node.first + node.count, 1)) return 0;
        break;
      default: break;
    }
    nodes.push_back(node);
    return push(i, 1, levels + 1);
  }

  size_t fill(size_t i, size_t count) {
    Node node{static_cast<Value>(i), 0, 0};
    size_t from;
    uint16_t levels;
    if (!take(count, true, node, from, levels)) return 0;
    Item& filled = stack_[from - 1];
    const Value target = filled.at;
    const uint8_t holder = op(target), does = data_[i];
    const bool object = holder == REDUCE || holder == NEWOBJ || holder == NEWOBJ_EX;
    bool keyed = false;
    switch (does) {
      case SETITEM: case SETITEMS:
        if (!object && holder != EMPTY_DICT) return 0;
        keyed = true;
        break;
      case APPEND: case APPENDS:
        if (!object && holder != EMPTY_LIST) return 0;
        break;
      case ADDITEMS:
        if (!object && holder != EMPTY_SET) return 0;
        break;
      default:
        if (!object) return 0;
    }
    const uint32_t end = node.first + node.count;
    if (does == SETITEMS && node.count % 2 == 0) return 0;  // a key without a value
    if (keyed || does == ADDITEMS) {
      const uint32_t marked = does == SETITEMS, stride = keyed ? 2 : 1;
      bool any = false;
      for (size_t k = from + marked; k < stack_.size(); k += stride) any |= stack_[k].height != 0;
      if (any && !keys(node.first + marked, end, stride)) return 0;
    }
    (does == BUILD ? built : grown)
        .push_back({target, static_cast<Value>(i), node.first, node.count});
    filled.height = std::max<uint16_t>(filled.height, levels + 1);
    if (filled.memo != 0) heights_[filled.memo - 1] = filled.height;
    stack_.resize(from);
    return i + 1;
  }

  bool is_text(Value value) const {
    const uint8_t kind = op(value);
    return kind == BINUNICODE || kind == SHORT_BINUNICODE || kind == BINUNICODE8;
  }

  // Hashing visits a shared tuple once for each reference: the steps are counted first.
  bool keys(uint32_t begin, uint32_t end, uint32_t stride) {
    for (uint32_t k = begin; k < end; k += stride) {
      std::vector<Value> todo{operands_[k]};
      uint64_t steps = 0;
      while (!todo.empty()) {
        const Value value = made(todo.back());
        todo.pop_back();
        const uint8_t kind = op(value);
        long_keys += kind == LONG1 || kind == LONG4;
        if (kind == TUPLE || kind == TUPLE1 || kind == TUPLE2 || kind == TUPLE3 ||
            kind == FROZENSET) {
          if (const Node* node = parts(value))
            todo.insert(todo.end(), operands_.begin() + node->first,
                        operands_.begin() + node->first + node->count);
        }
        if (++steps > limits_.key) return false;
      }
      if (long_keys > limits_.long_keys) return false;
    }
    return true;
  }

  size_t global(size_t i) {
    const Value value = static_cast<Value>(i);
    for (int line = 0; line < 2; ++line) {
      const size_t end = std::min(size_, i + 2 + limits_.name);
      if (i + 1 >= end) return 0;
      const void* found = std::memchr(data_ + i + 1, '\n', end - (i + 1));
      if (found == nullptr) return 0;
      i = static_cast<size_t>(static_cast<const uint8_t*>(found) - data_);
    }
    push(value, 0);
    return i + 1;
  }

  size_t frame(size_t i) {
    uint64_t length;
    if (!fits(i, 8, length)) return 0;
    frames.emplace_back(static_cast<Value>(i), length);
    gaps.emplace_back(static_cast<Value>(i + 9), static_cast<Value>(i));
    return i + 9;
  }

  size_t pop(size_t i) {
    const size_t floor = marks_.empty() ? 0 : marks_.back() + 1;
    Value popped;
    if (data_[i] == POP && stack_.size() > floor) {
      popped = start(stack_.back().at);
      stack_.pop_back();
    } else {
      if (marks_.empty()) return 0;
      popped = stack_[marks_.back()].at;
      stack_.resize(marks_.back());
      marks_.pop_back();
    }
    gaps.emplace_back(static_cast<Value>(i + 1), popped);
    return i + 1;
  }

  bool finish(size_t i) {
    if (stack_.size() != 1 || !marks_.empty()) return false;
    root = stack_[0].at;
    stop = i + 1;
    for (auto* fillings : {&grown, &built})
      std::sort(fillings->begin(), fillings->end(), [](const Filling& a, const Filling& b) {
        return std::pair(a.target, a.at) < std::pair(b.target, b.at);
      });
    heights_ = {};
    return true;
  }

  const uint8_t* data_;
  size_t size_;
  Limits limits_;
  Column<Value> operands_;
  Column<Item> stack_;
  Column<uint16_t> heights_;  // by memo index, those of `memo`
  std::vector<uint32_t> marks_;  // where on the stack the open marks are
  size_t set_ = 0;
};

}  // namespace shards
