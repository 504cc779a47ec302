// The central directory of a zip archive as torch writes it, by the rules of
// ckptsurgeon/files/archives/zip_directory.py.
//
// Accepted is a directory of stored records below 4 GiB with plain ASCII names; Python judges all
// others.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string_view>
#include <vector>

namespace shards {

using Bytes = std::string_view;

struct Record {
  uint32_t entry, offset, size, crc;
  uint16_t name, flags;  // length of the whole name
};

class Directory {
 public:
  explicit Directory(Bytes data) : data_(data) {}

  // `offset` is where the directory starts in the file. False: something that Python must judge.
  bool read(uint64_t count, uint64_t offset) {
    if (count == 0 || count > data_.size() / kEntry || data_.size() > UINT32_MAX) return false;
    records.reserve(count);
    size_t at = 0;
    while (records.size() < count) {
      if (!entry(at)) return false;
    }
    return at == data_.size() && apart(offset) && distinct();
  }

  Bytes data() const { return data_; }

  // Its name without the folder.
  Bytes name(const Record& record) const {
    return data_.substr(record.entry + kEntry + folder.size(), record.name - folder.size());
  }

  const Record* find(Bytes wanted) const {
    for (size_t slot = hash(wanted);; ++slot) {
      const uint32_t number = table_[slot % table_.size()];
      if (number == 0) return nullptr;
      if (name(records[number - 1]) == wanted) return &records[number - 1];
    }
  }

  // Where the payload of a record starts in `head`, the first bytes of the record, whose local header
  // must say what its entry says; 0 if Python must judge, or if it does not lie in `head`.
  size_t payload(const Record& record, Bytes head) const {
    const Bytes whole = data_.substr(record.entry + kEntry, record.name);
    const size_t named = kLocal + whole.size();
    if (head.size() < named || head.substr(0, 4) != "PK\3\4") return 0;
    const auto number = [&head](size_t at) {
      uint32_t out;
      std::memcpy(&out, head.data() + at, sizeof out);
      return out;
    };
    const uint32_t crc = number(14), packed = number(18), size = number(22), lengths = number(26);
    const bool known = crc == record.crc && packed == record.size && size == record.size;
    const auto open = [](uint32_t value) { return value == 0 || value == UINT32_MAX; };
    const bool later = record.flags & kDescriptor && crc == 0 && open(packed) && open(size);
    if ((number(6) & 0xFFFF) != record.flags || (number(6) >> 16) != 0 || !(known || later) ||
        (lengths & 0xFFFF) != whole.size() || head.substr(kLocal, whole.size()) != whole)
      return 0;
    const size_t start = named + (lengths >> 16);
    return start + record.size <= head.size() ? start : 0;
  }

  std::vector<Record> records;
  Bytes folder;  // with its slash

 private:
  static constexpr size_t kEntry = 46, kLocal = 30;
  static constexpr uint16_t kEncrypted = 0x2041, kDescriptor = 0x0008;

  template <typename Number>
  Number field(size_t at) const {
    Number out;
    std::memcpy(&out, data_.data() + at, sizeof out);
    return out;
  }

  bool entry(size_t& at) {
    if (at + kEntry > data_.size() || data_.compare(at, 4, "PK\1\2") != 0) return false;
    const uint16_t length = field<uint16_t>(at + 28), extra = field<uint16_t>(at + 30),
                   comment = field<uint16_t>(at + 32), disk = field<uint16_t>(at + 34);
    const uint32_t packed = field<uint32_t>(at + 20);
    const Record record{static_cast<uint32_t>(at), field<uint32_t>(at + 42),
                        field<uint32_t>(at + 24),  field<uint32_t>(at + 16),
                        length,                    field<uint16_t>(at + 8)};
    if (disk != 0 || at + kEntry + length + extra + comment > data_.size()) return false;
    if (field<uint16_t>(at + 10) != 0 || packed != record.size || record.flags & kEncrypted ||
        record.size == UINT32_MAX || record.offset == UINT32_MAX)
      return false;
    const Bytes whole = data_.substr(at + kEntry, length);
    if (records.empty()) folder = whole.substr(0, whole.find('/') + 1);
    if (folder.size() < 2 || whole.substr(0, folder.size()) != folder) return false;
    if (whole.find("..") != Bytes::npos) return false;
    for (const char letter : whole)
      if (letter <= 0 || letter == '\\') return false;
    records.push_back(record);
    at += kEntry + length + extra + comment;
    return true;
  }

  // No record reaches into the next one or into the directory.
  bool apart(uint64_t end) const {
    std::vector<uint32_t> order(records.size());
    std::iota(order.begin(), order.end(), 0);
    const auto before = [this](uint32_t a, uint32_t b) {
      return records[a].offset < records[b].offset;
    };
    if (!std::is_sorted(order.begin(), order.end(), before))
      std::sort(order.begin(), order.end(), before);
    for (size_t k = order.size(); k-- > 0;) {
      const Record& record = records[order[k]];
      const uint64_t named = kLocal + record.name - folder.size();
      if (record.offset + named + record.size > end) return false;
      end = record.offset;
    }
    return true;
  }

  static char lower(char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + 'a' - 'A') : letter;
  }

  static bool alike(Bytes left, Bytes right) {
    if (left.size() != right.size()) return false;
    for (size_t k = 0; k < left.size(); ++k)
      if (lower(left[k]) != lower(right[k])) return false;
    return true;
  }

  static size_t hash(Bytes text) {  // FNV-1a
    uint64_t out = 0xcbf29ce484222325;
    for (const char letter : text) out = (out ^ static_cast<uint8_t>(lower(letter))) * 0x100000001b3;
    return static_cast<size_t>(out >> 20);
  }

  // No two names are the same without regard to case. A file that makes them collide goes to Python.
  bool distinct() {
    table_.resize(2 * records.size() + 1);
    size_t steps = 0;
    for (size_t k = 0; k < records.size(); ++k) {
      const Bytes wanted = name(records[k]);
      size_t slot = hash(wanted);
      while (const uint32_t other = table_[slot % table_.size()]) {
        if (alike(name(records[other - 1]), wanted)) return false;
        if (++steps > 64 * records.size() + 4096) return false;
        ++slot;
      }
      table_[slot % table_.size()] = static_cast<uint32_t>(k + 1);
    }
    return true;
  }

  Bytes data_;
  std::vector<uint32_t> table_;  // by hash, the number of a record and 1; 0 is none
};

}  // namespace shards
