// The stack and the memo of a machine for pickles that keeps of each value no more than what a Metadata
// of torch.distributed.checkpoint may be made of.

#pragma once

#include <set>
#include <string>

#include "numbered.hpp"
#include "opcodes.hpp"

namespace shards {

// A set of numbers, with the rank of each among them.
class Ranks {
 public:
  void add(size_t k) {
    if (k / 64 >= words_.size()) words_.resize(std::max(k / 64 + 1, words_.size() * 3 / 2));
    words_[k / 64] |= uint64_t{1} << k % 64;
  }
  bool has(size_t k) const { return k / 64 < words_.size() && words_[k / 64] >> k % 64 & 1; }
  // After the last `add`.
  size_t count() {
    size_t out = 0;
    before_.reserve(words_.size());
    for (const uint64_t word : words_) {
      before_.push_back(static_cast<uint32_t>(out));
      out += static_cast<size_t>(__builtin_popcountll(word));
    }
    return out;
  }
  uint32_t rank(size_t k) const {
    const uint64_t below = words_[k / 64] & ((uint64_t{1} << k % 64) - 1);
    return before_[k / 64] + static_cast<uint32_t>(__builtin_popcountll(below));
  }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint32_t> before_;  // of each word
};

class Stack {
 public:
  Stack(const uint8_t* data, size_t size, const Limits& limits)
      : globals(kLeast), tuples(kLeast + size / 2), data_(data), size_(size), limits_(limits) {}

  Numbered<char> globals;
  Numbered<int64_t> tuples;
  std::vector<std::pair<uint32_t, uint64_t>> frames;
  std::vector<std::pair<uint32_t, uint32_t>> odd_texts;  // not plain ASCII: position, length
  std::set<std::string> members;  // `module.Class.name` of each that is made by its name

 protected:
  static constexpr size_t kLeast = 1 << 20, kDeepest = 1 << 16, kOpen = 1 << 13, kAttributes = 8,
                          kOddTexts = 1024, kLongestName = 4096, kMembers = 1024, kAxes = 64;

  enum class Kind : uint8_t {
    kOther, kNone, kInteger, kText, kGlobal, kTuple, kBoxed, kLed, kPlainTuple, kDict, kList, kSet,
    kMade, kIndex, kInfo, kChunk, kProperties, kWhole, kRoot,
  };
  using Flags = uint8_t;
  static constexpr Flags kFresh = 1, kObject = 2, kPut = 4, kRead = 8, kLong = 16;

  struct Item {
    Kind kind = Kind::kOther;
    Flags flags = kFresh;
    uint16_t height = 0;
    uint32_t at = 0;    // of the opcode that pushed it
    uint32_t slot = 0;  // 1 above where `kept_` has it, if a GET asks for it
    uint32_t a = 0;
    uint64_t b = 0;
    bool is(Kind wanted) const { return kind == wanted; }
    bool fresh() const { return flags & kFresh; }
  };
  struct Attribute {
    Bytes key;
    Item value;
  };
  struct Attributes {
    std::array<Attribute, kAttributes> all;
    size_t count = 0;
    const Item* find(Bytes key) const {
      for (size_t k = 0; k < count; ++k)
        if (all[k].key == key) return &all[k].value;
      return nullptr;
    }
  };

  // --- the memo: only what a GET asks for is kept -------------------------------------------------

  bool ask() {
    for (size_t i = 2; i < size_ && data_[i] != STOP;) {
      const uint8_t op = data_[i];
      const size_t bytes = width(data_, size_, i, limits_);
      if (bytes == 0) return false;
      if (Scan::is_get(op)) {
        if (index(i) >= size_) return false;
        asked_.add(index(i));
      }
      i += bytes;
    }
    const size_t count = asked_.count();
    if (count > size_ / 24 + 4096) return false;
    kept_.resize(count);
    return true;
  }

  size_t index(size_t i) const {
    if (data_[i] == BINGET || data_[i] == BINPUT) return data_[i + 1];
    uint32_t out;
    std::memcpy(&out, data_ + i + 1, sizeof out);
    return out;
  }

  bool put(size_t i) {
    const size_t k = data_[i] == MEMOIZE ? count_ : index(i);
    if (stack_.empty() || (!marks_.empty() && stack_.size() <= marks_.back())) return false;
    Item& item = stack_.back();
    if (k >= i || set_.has(k) || item.flags & kPut || item.is(Kind::kInteger)) return false;
    // A text and its PUT are replaced together.
    if (item.is(Kind::kText) && item.at + width(data_, size_, item.at, limits_) != i) return false;
    set_.add(k);
    ++count_;
    item.flags |= kPut;
    if (!asked_.has(k)) return true;
    item.slot = asked_.rank(k) + 1;
    item.flags |= kRead;
    Item& kept = kept_[item.slot - 1];
    kept = item;
    kept.flags &= static_cast<Flags>(~kFresh);
    const bool open = item.is(Kind::kMade) || item.is(Kind::kDict) || item.is(Kind::kList);
    if (open || item.is(Kind::kSet)) kept.kind = Kind::kOther;
    return true;
  }

  bool get(size_t i) {
    const size_t k = index(i);
    if (!set_.has(k)) return false;
    Item item = kept_[asked_.rank(k)];
    item.at = static_cast<uint32_t>(i);
    item.slot = 0;
    pushed_ += item.is(Kind::kGlobal) && is_getattr(global_name(item.a));
    item.flags |= kPut;  // it has one, and none of its own after this
    stack_.push_back(item);
    return true;
  }

  // --- opcodes -------------------------------------------------------------------------------------

  Item& push(size_t i, Kind kind = Kind::kOther) {
    stack_.emplace_back();
    stack_.back().kind = kind;
    stack_.back().at = static_cast<uint32_t>(i);
    return stack_.back();
  }

  bool integer(size_t i, int64_t value) {
    push(i, Kind::kInteger).b = static_cast<uint64_t>(value);
    return true;
  }

  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  // Close the last mark; a value must lie below it.
  bool marked() {
    if (marks_.empty()) return false;
    first_ = marks_.back();
    marks_.pop_back();
    return first_ > floor();
  }

  // Take the values from `first` on off the stack, with what dicts among them hold.
  void drop(size_t first) {
    for (size_t k = first; k < stack_.size(); ++k)
      if (stack_[k].is(Kind::kDict) && stack_[k].a != 0) free_.push_back(stack_[k].a);
    stack_.resize(first);
  }

  // One more level than the highest from `first` on; 0 for too many.
  uint16_t levels(size_t first) const {
    uint16_t out = 0;
    for (size_t k = first; k < stack_.size(); ++k) out = std::max(out, stack_[k].height);
    return out + 1u > limits_.depth ? 0 : static_cast<uint16_t>(out + 1);
  }

  bool long_integer(size_t i, size_t length) {
    if (length > 8) {
      push(i).flags |= kLong;
      return length <= limits_.integer;
    }
    uint64_t number = length && data_[i + 1 + length] & 0x80 ? ~uint64_t{0} : 0;  // its sign
    std::memcpy(&number, data_ + i + 2, length);
    Item& item = push(i, Kind::kInteger);
    item.b = number;
    if (length == 8) item.flags |= kLong;
    return true;
  }

  bool text(size_t i, size_t head, size_t bytes) {
    Item& item = push(i, Kind::kText);
    item.a = static_cast<uint32_t>(bytes - head);
    item.b = i + head;
    const Bytes own = bytes_of(item);
    if (std::any_of(own.begin(), own.end(), [](char letter) { return letter < 0; })) {
      odd_texts.emplace_back(static_cast<uint32_t>(item.b), item.a);
      return odd_texts.size() <= kOddTexts;
    }
    return true;
  }

  Bytes bytes_of(const Item& text) const {
    return {reinterpret_cast<const char*>(data_) + text.b, text.a};
  }

  bool dict(size_t i) {
    uint32_t own;
    if (free_.empty()) {
      if (pool_.size() == kOpen) return false;
      pool_.emplace_back();
      own = static_cast<uint32_t>(pool_.size());
    } else {
      own = free_.back();
      free_.pop_back();
    }
    pool_[own - 1].count = 0;
    push(i, Kind::kDict).a = own;
    return true;
  }

  bool tuple(size_t i, size_t first) {
    const uint16_t height = levels(first);
    if (height == 0) return false;
    const size_t count = stack_.size() - first;
    Item made;
    made.at = static_cast<uint32_t>(i);
    made.height = height;
    const auto each = [](Kind kind) { return [kind](const Item& item) { return item.is(kind); }; };
    if (std::all_of(stack_.begin() + static_cast<ptrdiff_t>(first), stack_.end(),
                    each(Kind::kInteger))) {
      if (count > kAxes) return false;
      numbers_.clear();
      for (size_t k = first; k < stack_.size(); ++k)
        numbers_.push_back(static_cast<int64_t>(stack_[k].b));
      if (!tuples.number(numbers_.data(), count, made.a)) return false;
      made.kind = Kind::kTuple;
    } else if (count == 1 && stack_[first].is(Kind::kTuple)) {
      made.kind = Kind::kBoxed;
      made.a = stack_[first].a;
    } else if (stack_[first].is(Kind::kGlobal)) {
      made.kind = Kind::kLed;
      made.a = stack_[first].a;
      const Item& last = stack_.back();
      if (count == 2 && last.is(Kind::kText) && last.a <= kLongestName)
        made.b = last.b << 16 | last.a;
    } else {
      made.kind = Kind::kPlainTuple;
    }
    drop(first);
    stack_.push_back(made);
    return true;
  }

  bool named(size_t i, const std::string& name) {
    uint32_t number;
    if (!globals.number(name.data(), name.size(), number)) return false;
    push(i, Kind::kGlobal).a = number;
    pushed_ += is_getattr(name);
    return true;
  }

  bool global(size_t i, size_t bytes) {
    std::string name(reinterpret_cast<const char*>(data_ + i + 1), bytes - 2);
    name[name.find('\n')] = '.';
    const bool plain = std::none_of(name.begin(), name.end(), [](char c) { return c < 0; });
    return plain && named(i, name);
  }

  bool stack_global(size_t i) {
    if (stack_.size() < floor() + 2) return false;
    const Item &module = stack_[stack_.size() - 2], &name = stack_.back();
    if (!module.is(Kind::kText) || !name.is(Kind::kText)) return false;
    if (module.a > limits_.name || name.a > limits_.name) return false;
    const std::string whole = std::string(bytes_of(module)) + "." + std::string(bytes_of(name));
    stack_.resize(stack_.size() - 2);
    return named(i, whole);
  }

  Bytes global_name(uint32_t number) const {
    const auto run = globals.run(number);
    return {run.data, run.size};
  }

  // What the general reader makes of these names is no object.
  static bool is_object(Bytes name) {
    return name.substr(0, 12) != "collections." && name != "torch.Size" &&
           name.substr(0, 7) != "torch._";
  }

  static bool is_getattr(Bytes name) {
    return name == "builtins.getattr" || name == "__builtin__.getattr";
  }

  // Some releases of Python 3.11 save a member of an enum as the attribute of its class of this name.
  // Whatever else is done with `getattr`, Python judges.
  bool member(const Item& words) {
    const Bytes name(reinterpret_cast<const char*>(data_) + (words.b >> 16), words.b & 0xFFFF);
    const auto odd = [](char letter) { return letter <= 0; };
    if (!words.is(Kind::kLed) || words.b == 0 || std::any_of(name.begin(), name.end(), odd))
      return false;
    members.insert(std::string(global_name(words.a)) + "." + std::string(name));
    ++called_;
    return members.size() <= kMembers;
  }

  // Whether each `getattr` on the way made a member, and so none is part of a value.
  bool only_members() const { return pushed_ == called_; }

  bool call(size_t i) {
    if (stack_.size() < floor() + 2) return false;
    const Item maker = stack_[stack_.size() - 2], words = stack_.back();
    const bool tuple = words.is(Kind::kTuple) || words.is(Kind::kBoxed) || words.is(Kind::kLed) ||
                       words.is(Kind::kPlainTuple);
    const uint16_t height = levels(stack_.size() - 2);
    if (!maker.is(Kind::kGlobal) || !tuple || height == 0) return false;
    drop(stack_.size() - 2);
    Item& made = push(i);
    made.height = height;
    const Bytes name = global_name(maker.a);
    if (data_[i] == REDUCE && name == "torch.Size") {
      if (!words.is(Kind::kBoxed)) return false;
      made.kind = Kind::kTuple;
      made.a = words.a;
      return true;
    }
    if (is_getattr(name) && (data_[i] != REDUCE || !member(words))) return false;
    made.flags |= kObject;
    if (is_object(name)) made.kind = Kind::kMade;
    return made.is(Kind::kMade) || data_[i] == REDUCE;
  }

  const uint8_t* data_;
  size_t size_;
  Limits limits_;
  Ranks asked_, set_;
  size_t count_ = 0, first_ = 0, pushed_ = 0, called_ = 0;
  std::vector<Item> kept_;
  std::vector<Item> stack_;
  std::vector<size_t> marks_;
  std::vector<Attributes> pool_;
  std::vector<uint32_t> free_;  // of the pool, 1 above the index
  std::vector<int64_t> numbers_;
};

}  // namespace shards
