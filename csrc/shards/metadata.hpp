// What a `.metadata` of torch.distributed.checkpoint says of its chunks, in columns, without a value
// for each.
//
// A stack machine for the opcodes of pickle that knows the kinds of values that a Metadata is made of
// and nothing more. What it accepts, the general reader (scan.hpp, tree.py) reads alike; it refuses
// whatever it does not know, and Python judges. Memory is in proportion to the file: kept are a row
// for each chunk and the values that a later GET asks for.

#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "numbered.hpp"
#include "scan.hpp"

namespace shards {

// The bytes of the opcode at `i` with what belongs to it; 0 for one that is none or does not fit.
inline size_t width(const uint8_t* data, size_t size, size_t i, const Limits& limits) {
  const auto number = [&](size_t bytes) -> uint64_t {
    uint64_t out = 0;
    if (i + 1 + bytes > size) return UINT32_MAX;
    std::memcpy(&out, data + i + 1, bytes);
    return std::min<uint64_t>(out, UINT32_MAX);
  };
  uint64_t out = 1;
  switch (data[i]) {
    case BININT1: case BINPUT: case BINGET: out = 2; break;
    case BININT2: out = 3; break;
    case BININT: case LONG_BINPUT: case LONG_BINGET: out = 5; break;
    case BINFLOAT: case FRAME: out = 9; break;
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
    case NONE: case NEWTRUE: case NEWFALSE: case EMPTY_DICT: case EMPTY_LIST: case EMPTY_SET:
    case EMPTY_TUPLE: case MEMOIZE: case MARK: case TUPLE: case TUPLE1: case TUPLE2: case TUPLE3:
    case STACK_GLOBAL: case REDUCE: case NEWOBJ: case SETITEM: case SETITEMS: case APPEND:
    case APPENDS: case ADDITEMS: case BUILD: case POP: case STOP: break;
    default: return 0;
  }
  return i + out <= size ? out : 0;
}

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
    for (size_t k = 0; k < words_.size(); ++k) {
      if (k % 8 == 0) before_.push_back(static_cast<uint32_t>(out));
      out += static_cast<size_t>(__builtin_popcountll(words_[k]));
    }
    return out;
  }
  uint32_t rank(size_t k) const {
    uint32_t out = before_[k / 512];
    for (size_t word = k / 512 * 8; word < k / 64; ++word)
      out += static_cast<uint32_t>(__builtin_popcountll(words_[word]));
    return out + static_cast<uint32_t>(
                     __builtin_popcountll(words_[k / 64] & ((uint64_t{1} << k % 64) - 1)));
  }

 private:
  std::vector<uint64_t> words_;
  std::vector<uint32_t> before_;  // of every eighth word
};

struct Row {
  uint64_t start, length;
  uint32_t name, file, offset;        // `offset` is 1 above the number of its tuple; 0 is none
  uint32_t path_at, start_at, length_at;  // where these values stand in the pickle
};

struct Piece {
  uint32_t offset, shape;  // numbers of tuples
};

struct Whole {
  uint32_t dtype, size;  // 1 above the number of a global, of a tuple; 0 is none
  uint32_t first, count;
};

class Metadata {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kShared = 0x80000000;  // of Row::path_at: a GET reads the text too

  Metadata(const uint8_t* data, size_t size, const Limits& limits)
      : names(kLeast + size / 8), files(kLeast + size / 8), globals(kLeast), tuples(kLeast + size / 2),
        data_(data), size_(size), limits_(limits) {}

  // False: something that Python must judge.
  bool read() {
    if (size_ < 2 || size_ >= kShared || data_[0] != PROTO || data_[1] < 2 || data_[1] > 5)
      return false;
    if (!ask()) return false;
    stack_.reserve(4096);
    rows.reserve(size_ / 128);  // what is not written takes no memory
    for (size_t i = 2; i < size_;) {
      if (data_[i] == STOP) return i + 1 == size_ && finish();
      const size_t bytes = width(data_, size_, i, limits_);
      if (bytes == 0 || !step(i, bytes) || stack_.size() > kDeepest) return false;
      i += bytes;
    }
    return false;
  }

  std::vector<Row> rows;
  std::vector<Piece> pieces;
  std::vector<uint32_t> whole_of;  // by name, 1 above the index in `wholes`
  std::vector<Whole> wholes;
  Numbered<char> names, files, globals;
  Numbered<int64_t> tuples;
  std::vector<std::pair<uint32_t, uint64_t>> frames;
  std::vector<std::pair<uint32_t, uint32_t>> odd_texts;  // not plain ASCII: position, length

 private:
  static constexpr size_t kLeast = 1 << 20, kDeepest = 1 << 16, kAttributes = 8, kOddTexts = 1024;
  static constexpr uint64_t kPlain = UINT64_MAX;  // `b` of a list of something else than chunks

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

  bool step(size_t i, size_t bytes) {
    switch (data_[i]) {
      case NONE: push(i, Kind::kNone); return true;
      case NEWTRUE: case NEWFALSE: case BINFLOAT: case SHORT_BINBYTES: case BINBYTES:
      case BINBYTES8: push(i); return true;
      case EMPTY_DICT: return dict(i);
      case EMPTY_LIST: push(i, Kind::kList); return true;
      case EMPTY_SET: push(i, Kind::kSet); return true;
      case EMPTY_TUPLE: return tuple(i, stack_.size());
      case BININT1: return integer(i, data_[i + 1]);
      case BININT2: return integer(i, data_[i + 1] | data_[i + 2] << 8);
      case BININT: return integer(i, static_cast<int32_t>(index(i)));
      case LONG1: return long_integer(i, data_[i + 1]);
      case SHORT_BINUNICODE: return text(i, 2, bytes);
      case BINUNICODE: return text(i, 5, bytes);
      case BINUNICODE8: return text(i, 9, bytes);
      case BINPUT: case LONG_BINPUT: case MEMOIZE: return put(i);
      case BINGET: case LONG_BINGET: return get(i);
      case MARK:
        marks_.push_back(stack_.size());
        return marks_.size() <= limits_.depth;
      case TUPLE1: return stack_.size() >= floor() + 1 && tuple(i, stack_.size() - 1);
      case TUPLE2: return stack_.size() >= floor() + 2 && tuple(i, stack_.size() - 2);
      case TUPLE3: return stack_.size() >= floor() + 3 && tuple(i, stack_.size() - 3);
      case TUPLE: {
        if (marks_.empty()) return false;
        const size_t first = marks_.back();
        marks_.pop_back();
        return tuple(i, first);
      }
      case GLOBAL: return global(i, bytes);
      case STACK_GLOBAL: return stack_global(i);
      case REDUCE: case NEWOBJ: return call(i);
      case BUILD: return build();
      case SETITEM: return stack_.size() >= floor() + 3 && set(stack_.size() - 2);
      case SETITEMS: return marked() && set(first_);
      case APPEND: return stack_.size() >= floor() + 2 && append(stack_.size() - 1);
      case APPENDS: return marked() && append(first_);
      case ADDITEMS: return marked() && add(first_);
      case POP:
        if (stack_.size() <= floor()) return false;
        drop(stack_.size() - 1);
        return true;
      case FRAME: {
        uint64_t length;
        std::memcpy(&length, data_ + i + 1, sizeof length);
        frames.emplace_back(static_cast<uint32_t>(i), length);
        return length <= size_ - bytes - i;
      }
      default: return false;
    }
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
    made.flags |= kObject;
    if (data_[i] == NEWOBJ) {
      if (!is_object(name)) return false;
      made.kind = Kind::kMade;
    }
    return true;
  }

  // --- containers that are filled ------------------------------------------------------------------

  // The values from `first` on go into what lies below them.
  bool fill(size_t first, Item*& holder) {
    holder = &stack_[first - 1];
    const uint16_t height = levels(first);
    if (!holder->fresh() || height == 0) return false;
    holder->height = std::max<uint16_t>(holder->height, height);
    if (holder->slot) kept_[holder->slot - 1].height = holder->height;
    if (holder->is(Kind::kMade)) holder->kind = Kind::kOther;
    return true;
  }

  static bool is_key(const Item& item) {
    if (item.is(Kind::kInteger)) return !(item.flags & kLong);
    return item.is(Kind::kText) || item.is(Kind::kNone) || item.is(Kind::kIndex);
  }

  bool add(size_t first) {
    Item* holder;
    if (!fill(first, holder) || !holder->is(Kind::kSet)) return false;
    const bool all = std::all_of(stack_.begin() + static_cast<ptrdiff_t>(first), stack_.end(), is_key);
    drop(first);
    return all;
  }

  bool append(size_t first) {
    Item* holder;
    if (!fill(first, holder)) return false;
    if (!holder->is(Kind::kList)) {
      if (!(holder->flags & kObject)) return false;
      drop(first);
      return true;
    }
    for (size_t k = first; k < stack_.size(); ++k) {
      if (!stack_[k].is(Kind::kChunk)) holder->b = kPlain;
      if (holder->b == kPlain) break;
      if (holder->b == 0) holder->a = static_cast<uint32_t>(pieces.size());
      if (holder->a + holder->b++ != pieces.size() || pieces.size() > size_ / 16) return false;
      pieces.push_back({stack_[k].a, static_cast<uint32_t>(stack_[k].b)});
    }
    drop(first);
    return true;
  }

  bool set(size_t first) {
    Item* holder;
    if (!fill(first, holder) || (stack_.size() - first) % 2 != 0) return false;
    const bool is_dict = holder->is(Kind::kDict);
    if (!is_dict && !(holder->flags & kObject)) return false;
    for (size_t k = first; k < stack_.size(); k += 2)
      if (!is_key(stack_[k]) || !(is_dict ? keep(*holder, stack_[k], stack_[k + 1]) : true))
        return false;
    drop(first);
    return true;
  }

  // What becomes of a pair of a dict. `b` of the dict: 1 for that of the chunks, 2 for that of the
  // tensors.
  bool keep(Item& holder, const Item& key, const Item& value) {
    if (key.is(Kind::kIndex) || value.is(Kind::kInfo)) {
      if (!key.is(Kind::kIndex) || !value.is(Kind::kInfo)) return false;
      if (holder.b == 0) {
        if (has_rows_ || holder.a == 0 || pool_[holder.a - 1].count != 0) return false;
        has_rows_ = true;
        become(holder, 1);
      }
      uint32_t at = value.a;
      if (rows[at].name != kNone) {  // several chunks share one object
        if (rows.size() > size_ / 32) return false;
        rows.push_back(rows[at]);
        at = static_cast<uint32_t>(rows.size() - 1);
      }
      rows[at].name = key.a;
      rows[at].offset = static_cast<uint32_t>(key.b);
      return true;
    }
    if (holder.b == 1) return false;
    if (value.is(Kind::kWhole)) {
      if (!key.is(Kind::kText)) return false;
      if (holder.b == 0) {
        if (has_wholes_) return false;
        has_wholes_ = true;
        become(holder, 2);
      }
      uint32_t name;
      if (!names.number(bytes_of(key).data(), key.a, name)) return false;
      if (whole_of.size() <= name) whole_of.resize(name + 1);
      if (whole_of[name] != 0) return false;
      whole_of[name] = value.a + 1;
      return true;
    }
    if (holder.a == 0) return true;
    Attributes& own = pool_[holder.a - 1];
    if (!key.is(Kind::kText) || own.count == kAttributes) {
      free_.push_back(holder.a);
      holder.a = 0;
      return true;
    }
    if (own.find(bytes_of(key)) != nullptr) return false;
    own.all[own.count++] = {bytes_of(key), value};
    if (value.is(Kind::kDict)) own.all[own.count - 1].value.a = 0;
    return true;
  }

  // A dict of many is none of attributes: what it had before that is of no interest here.
  void become(Item& holder, uint64_t kind) {
    if (holder.a != 0) free_.push_back(holder.a);
    holder.a = 0;
    holder.b = kind;
  }

  // --- objects -------------------------------------------------------------------------------------

  bool build() {
    if (stack_.size() < floor() + 2) return false;
    Item &made = stack_[stack_.size() - 2], &state = stack_.back();
    const uint16_t height = levels(stack_.size() - 1);
    if (!made.fresh() || !(made.flags & kObject) || height == 0) return false;
    made.height = std::max<uint16_t>(made.height, height);
    if (made.is(Kind::kMade)) {
      made.kind = Kind::kOther;
      if (state.is(Kind::kLed)) {
        made.kind = Kind::kProperties;
        made.a = state.a;
      } else if (state.is(Kind::kDict) && state.a != 0) {
        if (!classify(made, pool_[state.a - 1])) return false;
      }
    } else if (!made.is(Kind::kOther)) {
      return false;
    }
    drop(stack_.size() - 1);
    Item& done = stack_.back();
    if (done.slot) {
      const uint8_t flags = kept_[done.slot - 1].flags;
      kept_[done.slot - 1] = done;
      kept_[done.slot - 1].flags = flags;
    }
    return true;
  }

  // False for what looks like a part of Metadata and is not as torch writes it.
  bool classify(Item& made, const Attributes& own) {
    if (own.find("fqn")) return of_index(made, own);
    if (own.find("relative_path")) return of_info(made, own);
    if (own.find("storage_data")) return of_root(made, own);
    const Item *offsets = own.find("offsets"), *sizes = own.find("sizes");
    if (offsets && sizes && offsets->is(Kind::kTuple) && sizes->is(Kind::kTuple)) {
      made.kind = Kind::kChunk;
      made.a = offsets->a;
      made.b = sizes->a;
      return tuples.run(offsets->a).size == tuples.run(sizes->a).size;
    }
    const Item *properties = own.find("properties"), *chunks = own.find("chunks"),
               *size = own.find("size");
    if (properties && chunks && size) {
      made.kind = Kind::kWhole;
      made.a = static_cast<uint32_t>(wholes.size());
      const bool listed = chunks->is(Kind::kList) && chunks->b - 1 < pieces.size();
      wholes.push_back({properties->is(Kind::kProperties) ? properties->a + 1 : 0,
                        size->is(Kind::kTuple) ? size->a + 1 : 0, listed ? chunks->a : 0,
                        listed ? static_cast<uint32_t>(chunks->b) : 0});
    }
    return true;
  }

  bool of_index(Item& made, const Attributes& own) {
    const Item *fqn = own.find("fqn"), *offset = own.find("offset");
    if (!fqn->is(Kind::kText) || !names.number(bytes_of(*fqn).data(), fqn->a, made.a)) return false;
    made.kind = Kind::kIndex;
    if (offset == nullptr || offset->is(Kind::kNone)) return true;
    made.b = offset->a + 1;
    return offset->is(Kind::kTuple);
  }

  bool of_info(Item& made, const Attributes& own) {
    const Item *path = own.find("relative_path"), *start = own.find("offset"),
               *length = own.find("length"), *transforms = own.find("transform_descriptors");
    if (!path->is(Kind::kText) || !start || !start->is(Kind::kInteger) || !length ||
        !length->is(Kind::kInteger) || (transforms && !transforms->is(Kind::kNone)))
      return false;
    if (static_cast<int64_t>(start->b) < 0 || static_cast<int64_t>(length->b) <= 0 ||
        start->b + length->b > INT64_MAX || rows.size() > size_ / 32)
      return false;
    Row row{start->b, length->b, kNone, 0, 0, path->at, start->at, length->at};
    if (path->flags & kRead && !Scan::is_get(data_[path->at])) row.path_at |= kShared;
    if (!files.number(bytes_of(*path).data(), path->a, row.file)) return false;
    made.kind = Kind::kInfo;
    made.a = static_cast<uint32_t>(rows.size());
    rows.push_back(row);
    return true;
  }

  bool of_root(Item& made, const Attributes& own) {
    const Item *chunks = own.find("storage_data"), *tensors = own.find("state_dict_metadata");
    if (!chunks->is(Kind::kDict) || chunks->b != 1) return false;
    if (has_wholes_ && (!tensors || !tensors->is(Kind::kDict) || tensors->b != 2)) return false;
    made.kind = Kind::kRoot;
    return true;
  }

  bool finish() const {
    const auto left = [](const Row& row) { return row.name == kNone; };
    return stack_.size() == 1 && marks_.empty() && stack_[0].is(Kind::kRoot) &&
           std::none_of(rows.begin(), rows.end(), left);
  }

  const uint8_t* data_;
  size_t size_;
  Limits limits_;
  Ranks asked_, set_;
  size_t count_ = 0, first_ = 0;
  std::vector<Item> kept_;
  std::vector<Item> stack_;
  std::vector<size_t> marks_;
  std::vector<Attributes> pool_;
  std::vector<uint32_t> free_;  // of the pool, 1 above the index
  std::vector<int64_t> numbers_;
  bool has_rows_ = false, has_wholes_ = false;
};

}  // namespace shards
