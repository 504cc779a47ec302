// Protobuf's wire format, as far as an Event needs it. Same reading as logs/tensorboard/message.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace events {

using Bytes = std::string_view;

constexpr uint64_t kWall = 0x09, kStep = 0x10, kSummary = 0x2A, kValue = 0x0A, kTag = 0x0A;

struct Field {
  uint64_t key;
  Bytes whole;    // with key and length
  Bytes content;  // without them
};

// An unsigned integer of up to 64 bits; false when it ends after `end` or has over 10 bytes.
inline bool varint(const char*& at, const char* end, uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    if (at == end) return false;
    const uint64_t byte = static_cast<uint8_t>(*at++);
    if (shift < 64) value |= (byte & 127) << shift;
    if (byte < 128) return true;
  }
  return false;
}

// The fields of a message, one by one. `bad` is set when the bytes are no message.
class Fields {
 public:
  explicit Fields(Bytes message) : at_(message.data()), end_(message.data() + message.size()) {}

  bool next(Field& field) {
    if (at_ == end_) return false;
    const char* begin = at_;
    uint64_t number = 0;
    if (!varint(at_, end_, field.key)) return fail();
    const char* start = at_;
    switch (field.key & 7) {
      case 0:
        if (!varint(at_, end_, number)) return fail();
        break;
      case 1:
        if (end_ - at_ < 8) return fail();
        at_ += 8;
        break;
      case 2:
        if (!varint(at_, end_, number)) return fail();
        start = at_;
        if (number > static_cast<uint64_t>(end_ - at_)) return fail();
        at_ += number;
        break;
      case 5:
        if (end_ - at_ < 4) return fail();
        at_ += 4;
        break;
      default:
        return fail();
    }
    field.whole = Bytes(begin, static_cast<size_t>(at_ - begin));
    field.content = Bytes(start, static_cast<size_t>(at_ - start));
    return true;
  }

  bool bad() const { return bad_; }

 private:
  bool fail() {
    bad_ = true;
    return false;
  }

  const char* at_;
  const char* end_;
  bool bad_ = false;
};

// The first tag of a Value; the rest of the value is not looked at. False: the value is bad.
inline bool find_tag(Bytes value, Field& tag, bool& found) {
  Fields fields(value);
  found = false;
  while (fields.next(tag)) {
    if (tag.key == kTag) {
      found = true;
      return true;
    }
  }
  return !fields.bad();
}

// Where the tag is in an event of the most common shape: wall time, step, one value that starts with
// its tag, and no length over 127. `step` is the offset of the step, 0 when there is none. The same
// shape as `plain` in logs/tensorboard/message.py; any other shape takes the general way.
struct Plain {
  size_t step, tag, tag_size;
};

inline bool plain(Bytes message, Plain& place) {
  const auto* byte = reinterpret_cast<const uint8_t*>(message.data());
  const size_t size = message.size();
  if (size < 18 || byte[0] != kWall) return false;
  size_t at = 9;
  place.step = 0;
  if (byte[9] == kStep) {
    place.step = 10;
    for (at = 11; byte[at - 1] > 127; ++at) {
      if (at > 18 || at + 7 > size) return false;
    }
  }
  if (at + 6 > size || byte[at] != kSummary) return false;
  const size_t length = byte[at + 1];
  if (length > 127 || at + 2 + length != size || byte[at + 2] != kValue ||
      byte[at + 3] + 2u != length || byte[at + 4] != kTag || byte[at + 5] > 127)
    return false;
  place.tag = at + 6;
  place.tag_size = byte[at + 5];
  return place.tag + place.tag_size <= size;
}

struct Event {
  double wall = 0;
  int64_t step = 0;
  uint8_t kind = 0;          // field number of what it holds, 0 for nothing
  std::vector<Bytes> tags;   // one per value; empty for a value without a tag
};

inline bool read(Bytes message, Event& event) {
  event.wall = 0;
  event.step = 0;
  event.kind = 0;
  event.tags.clear();
  if (Plain place; plain(message, place)) {
    std::memcpy(&event.wall, message.data() + 1, 8);
    if (place.step) {
      const char* at = message.data() + place.step;
      uint64_t step = 0;
      varint(at, message.data() + message.size(), step);
      event.step = static_cast<int64_t>(step);
    }
    event.kind = kSummary >> 3;
    event.tags.push_back(message.substr(place.tag, place.tag_size));
    return true;
  }
  Fields fields(message);
  Field field;
  while (fields.next(field)) {
    if (field.key == kWall) {
      std::memcpy(&event.wall, field.content.data(), 8);
    } else if (field.key == kStep) {
      const char* at = field.content.data();
      uint64_t step = 0;
      varint(at, at + field.content.size(), step);
      event.step = static_cast<int64_t>(step);
    } else if (const uint64_t number = field.key >> 3; number >= 3 && number <= 9) {
      event.kind = static_cast<uint8_t>(number);
      if (field.key != kSummary) continue;
      Fields values(field.content);
      Field value, tag;
      while (values.next(value)) {
        if (value.key != kValue) continue;
        bool found = false;
        if (!find_tag(value.content, tag, found)) return false;
        event.tags.push_back(found ? tag.content : Bytes());
      }
      if (values.bad()) return false;
    }
  }
  return !fields.bad();
}

inline void put_varint(std::string& out, uint64_t value) {
  while (value > 127) {
    out.push_back(static_cast<char>((value & 127) | 128));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

inline void put_field(std::string& out, uint64_t key, Bytes content) {
  put_varint(out, key);
  put_varint(out, content.size());
  out.append(content);
}

inline size_t varint_size(uint64_t value) {
  size_t size = 1;
  for (; value > 127; value >>= 7) ++size;
  return size;
}

// The one value of an event: where its tag, the value and the summary are. Almost every event has
// this shape, and its new bytes can be written in one go.
struct Single {
  Field summary, value, tag;
};

enum class Shape { kSingle, kOther, kBad };

inline Shape single(Bytes message, Single& place) {
  Fields fields(message);
  Field field;
  int summaries = 0, found_values = 0;
  bool found = false;
  while (fields.next(field)) {
    if (field.key != kSummary) continue;
    place.summary = field;
    ++summaries;
    Fields values(field.content);
    Field value;
    while (values.next(value)) {
      if (value.key != kValue) continue;
      ++found_values;
      place.value = value;
      if (!find_tag(value.content, place.tag, found)) return Shape::kBad;
    }
    if (values.bad()) return Shape::kBad;
  }
  if (fields.bad()) return Shape::kBad;
  return summaries == 1 && found_values == 1 && found ? Shape::kSingle : Shape::kOther;
}

inline Bytes before(Bytes outer, const Field& inner) {
  return {outer.data(), static_cast<size_t>(inner.whole.data() - outer.data())};
}

inline Bytes behind(Bytes outer, const Field& inner) {
  const char* start = inner.whole.data() + inner.whole.size();
  return {start, static_cast<size_t>(outer.data() + outer.size() - start)};
}

// The message of the most common shape with `name` for its tag, appended to `out`.
inline void put_plain(std::string& out, Bytes message, const Plain& place, Bytes name) {
  const size_t rest = message.size() - place.tag - place.tag_size;
  const size_t value_size = 1 + varint_size(name.size()) + name.size() + rest;
  out.append(message.substr(0, place.tag - 6));
  put_varint(out, kSummary);
  put_varint(out, 1 + varint_size(value_size) + value_size);
  put_varint(out, kValue);
  put_varint(out, value_size);
  put_field(out, kTag, name);
  out.append(message.substr(message.size() - rest));
}

// The message with `name` for its only tag, appended to `out`.
inline void put_single(std::string& out, Bytes message, const Single& place, Bytes name) {
  const auto size_with = [](size_t rest, size_t content) {
    return rest + 1 + varint_size(content) + content;
  };
  const Bytes value = place.value.content, summary = place.summary.content;
  const size_t value_size = size_with(value.size() - place.tag.whole.size(), name.size());
  const size_t summary_size = size_with(summary.size() - place.value.whole.size(), value_size);
  out.append(before(message, place.summary));
  put_varint(out, kSummary);
  put_varint(out, summary_size);
  out.append(before(summary, place.value));
  put_varint(out, kValue);
  put_varint(out, value_size);
  out.append(before(value, place.tag));
  put_field(out, kTag, name);
  out.append(behind(value, place.tag));
  out.append(behind(summary, place.value));
  out.append(behind(message, place.summary));
}

// The new name of a tag, and how many values got it.
struct NewName {
  std::string text;
  uint64_t count = 0;
};

// Any message with new tags, appended to `out`; false when the bytes are no event. `target(tag)`
// returns its NewName, or nullptr for a tag that stays; `given` are those that were used.
template <typename Target>
bool put_renamed(Bytes message, Target&& target, std::string& out, std::vector<NewName*>& given) {
  std::string summary, value_out;
  given.clear();
  Fields fields(message);
  Field field;
  while (fields.next(field)) {
    if (field.key != kSummary) {
      out.append(field.whole);
      continue;
    }
    summary.clear();
    bool summary_changed = false;
    Fields values(field.content);
    Field value, tag;
    while (values.next(value)) {
      NewName* name = nullptr;
      if (value.key == kValue) {
        bool found = false;
        if (!find_tag(value.content, tag, found)) return false;
        if (found) name = target(tag.content);
      }
      if (name == nullptr) {
        summary.append(value.whole);
        continue;
      }
      summary_changed = true;
      given.push_back(name);
      value_out.assign(before(value.content, tag));
      put_field(value_out, kTag, name->text);
      value_out.append(behind(value.content, tag));
      put_field(summary, value.key, value_out);
    }
    if (values.bad()) return false;
    if (summary_changed)
      put_field(out, field.key, summary);
    else
      out.append(field.whole);
  }
  return !fields.bad();
}

}  // namespace events
