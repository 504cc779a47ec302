// What a `.metadata` of torch.distributed.checkpoint says of its chunks, in columns, without a value
// for each.
//
// A stack machine for the opcodes of pickle that knows the kinds of values that a Metadata is made of
// and nothing more. What it accepts, the general reader (scan.hpp, tree.py) reads alike; it refuses
// whatever it does not know, and Python judges. Memory is in proportion to the file: kept are a row
// for each chunk and the values that a later GET asks for.

#pragma once

#include "stack.hpp"

namespace shards {

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

class Metadata : public Stack {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kShared = 0x80000000;  // of Row::path_at: a GET reads the text too

  Metadata(const uint8_t* data, size_t size, const Limits& limits)
      : Stack(data, size, limits), names(kLeast + size / 8), files(kLeast + size / 8) {}

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
  Numbered<char> names, files;

 private:
  static constexpr uint64_t kPlain = UINT64_MAX;  // `b` of a list of something else than chunks

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
    uint32_t name;
    if (holder.b == 2 && key.is(Kind::kText) &&
        names.known(bytes_of(key).data(), key.a, name) &&
        (name == names.kCollides || (name < whole_of.size() && whole_of[name] != 0)))
      return false;  // a tensor's name twice: the second would win
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
    return stack_.size() == 1 && marks_.empty() && stack_[0].is(Kind::kRoot) && only_members() &&
           std::none_of(rows.begin(), rows.end(), left);
  }

  bool has_rows_ = false, has_wholes_ = false;
};

}  // namespace shards
