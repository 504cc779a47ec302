// The records of an event file: an index of the good ones, and their bytes under new tags.
//
// Both stop at the first record that is not good, and say where: what to make of it (a torn tail, an
// error, a salvage) is decided by logs/tensorboard/event_file.py alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "crc32c.hpp"
#include "message.hpp"

namespace events {

constexpr uint64_t kFrame = 16;          // bytes of a record beside its payload
constexpr uint64_t kLargest = 64 << 20;  // bytes of the largest payload that is believed

template <typename T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

inline uint32_t masked(Bytes data) {
  return masked(reinterpret_cast<const uint8_t*>(data.data()), data.size());
}

// The checksum of a record's length. Nearly all lengths are small and come again and again.
inline uint32_t length_check(uint64_t length) {
  static const std::array<uint32_t, 512> small = [] {
    std::array<uint32_t, 512> checks{};
    for (uint64_t i = 0; i < checks.size(); ++i)
      checks[i] = masked(Bytes(reinterpret_cast<const char*>(&i), 8));
    return checks;
  }();
  if (length < small.size()) return small[length];
  return masked(Bytes(reinterpret_cast<const char*>(&length), 8));
}

// The payload of the record at `at`; false when there is no whole good one.
inline bool payload(Bytes file, uint64_t at, Bytes& message) {
  if (file.size() - at < kFrame) return false;
  const char* start = file.data() + at;
  const uint64_t length = load<uint64_t>(start);
  if (length > kLargest || length > file.size() - at - kFrame) return false;
  if (length_check(length) != load<uint32_t>(start + 8)) return false;
  message = Bytes(start + 12, length);
  return masked(message) == load<uint32_t>(start + 12 + length);
}

// Numbers for the tags of events, in the order in which they first appear.
class Groups {
 public:
  int32_t number(const std::vector<Bytes>& tags) {
    if (tags.empty()) return -1;
    if (tags.size() > 1) {
      key_.clear();
      for (const Bytes tag : tags) {
        put_varint(key_, tag.size());
        key_.append(tag);
      }
      return insert(many_, key_, tags);
    }
    // Events of one writer come in turns: the tag after this one is mostly the same again.
    const Bytes tag = tags[0];
    if (last_ >= 0) {
      const int32_t guess = next_[last_];
      if (guess >= 0 && names_[guess].size() == 1 && names_[guess][0] == tag) return last_ = guess;
    }
    const int32_t number = insert(one_, tag, tags);
    if (last_ >= 0) next_[last_] = number;
    return last_ = number;
  }

  const std::vector<std::vector<std::string>>& names() const { return names_; }

 private:
  using Known = std::unordered_map<Bytes, int32_t>;

  int32_t insert(Known& known, Bytes key, const std::vector<Bytes>& tags) {
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    const int32_t number = static_cast<int32_t>(names_.size());
    names_.emplace_back(tags.begin(), tags.end());
    next_.push_back(-1);
    keys_.emplace_back(key);
    known.emplace(keys_.back(), number);
    return number;
  }

  std::vector<std::vector<std::string>> names_;
  std::vector<int32_t> next_;
  std::deque<std::string> keys_;  // what the maps' views look at; never moves
  Known one_, many_;
  std::string key_;
  int32_t last_ = -1;
};

struct Columns {
  uint64_t* offsets;
  int64_t* steps;
  double* walls;
  int32_t* tags;
  uint8_t* kinds;
};

// Fills the columns, which have room for size / 16 records, and returns the number of good records;
// `end` is the byte after the last one.
inline size_t index(Bytes file, const Columns& columns, Groups& groups, uint64_t& end) {
  size_t count = 0;
  uint64_t at = 0;
  Event event;
  Bytes message;
  while (at < file.size() && payload(file, at, message) && read(message, event)) {
    columns.offsets[count] = at;
    columns.steps[count] = event.step;
    columns.walls[count] = event.wall;
    columns.tags[count] = event.kind == 5 ? groups.number(event.tags) : -1;
    columns.kinds[count] = event.kind;
    ++count;
    at += kFrame + message.size();
  }
  end = at;
  return count;
}

// What `target` throws for a record that is renamed elsewhere.
struct Elsewhere {};

// The bytes of records from `at` on under their new tags in `out`: of those that start in the next
// `limit` bytes, up to the first that is not good or is renamed elsewhere. Returns where it stopped; `out` stays empty when
// nothing has a new tag. `target` as in message.hpp.
template <typename Target>
uint64_t rename(Bytes file, uint64_t at, uint64_t limit, Target&& target, std::string& out) {
  const uint64_t start = at;
  uint64_t same = at;  // records from here on have no new tag and are not copied yet
  Bytes message;
  Plain common;
  Single place;
  std::string other;
  std::vector<NewName*> given;
  const auto frame = [&](auto&& put) {
    out.append(file.substr(same, at - same));
    const size_t header = out.size();
    out.append(12, '\0');
    put();
    const uint64_t length = out.size() - header - 12;
    std::memcpy(&out[header], &length, 8);
    const uint32_t head_check = length_check(length);
    std::memcpy(&out[header + 8], &head_check, 4);
    const uint32_t check = masked(Bytes(&out[header + 12], length));
    out.append(reinterpret_cast<const char*>(&check), 4);
    same = at + kFrame + message.size();
  };
  const auto step = [&] {
    if (plain(message, common)) {
      if (NewName* name = target(message.substr(common.tag, common.tag_size))) {
        frame([&] { put_plain(out, message, common, name->text); });
        ++name->count;
      }
      return true;
    }
    const Shape shape = single(message, place);
    if (shape == Shape::kBad) return false;
    if (shape == Shape::kSingle) {
      if (NewName* name = target(place.tag.content)) {
        frame([&] { put_single(out, message, place, name->text); });
        ++name->count;
      }
    } else {
      other.clear();
      if (!put_renamed(message, target, other, given)) return false;
      if (!given.empty()) frame([&] { out.append(other); });
      for (NewName* name : given) ++name->count;
    }
    return true;
  };
  try {
    while (at < file.size() && at - start < limit && payload(file, at, message) && step())
      at += kFrame + message.size();
  } catch (const Elsewhere&) {
  }
  if (same > start) out.append(file.substr(same, at - same));
  return at;
}

}  // namespace events
