// What comes after the last byte of a torch archive that is edited, by the rules of
// ckptsurgeon/files/archives/zip_tail.py: new records that are all zeros, and the new directory.
//
// Everything is below 4 GiB; Python writes what is not.

#pragma once

#include <string>
#include <utility>

#include "directory.hpp"

namespace shards {

template <typename Number>
void put(std::string& out, size_t at, Number number) {
  std::memcpy(out.data() + at, &number, sizeof number);
}

constexpr uint16_t kUtf8 = 0x0800;

// Headers and zeros one after the other. Zeros of at least `hole` bytes are left out of `data`: then
// a new span of the file begins behind them.
class Blanks {
 public:
  Blanks(Bytes folder, uint64_t start, uint64_t hole) : end(start), folder_(folder), hole_(hole) {}

  // False: too large, or too long a name.
  bool add(Bytes name, uint64_t size, uint32_t crc) {
    const size_t whole = folder_.size() + name.size();
    if (size >= UINT32_MAX || end >= UINT32_MAX || whole > UINT16_MAX) return false;
    if (spans.empty() || spans.back().second != end) spans.emplace_back(end, end);
    offsets.push_back(end);
    const auto padding = static_cast<uint16_t>(-(end + kLocal + whole + kExtra) % kAlignment);
    std::string head(kLocal, '\0');
    head.replace(0, 4, "PK\3\4");
    put(head, 6, kUtf8);
    put(head, 14, crc);
    put(head, 18, static_cast<uint32_t>(size));
    put(head, 22, static_cast<uint32_t>(size));
    put(head, 26, static_cast<uint16_t>(whole));
    put(head, 28, static_cast<uint16_t>(kExtra + padding));
    const size_t before = data.size();
    data.append(head).append(folder_).append(name).append("FB");
    data.append(reinterpret_cast<const char*>(&padding), sizeof padding).append(padding, 'Z');
    if (size < hole_) data.append(size, '\0');
    end += data.size() - before;
    spans.back().second = end;
    if (size >= hole_) end += size;
    return true;
  }

  std::string data;
  std::vector<std::pair<uint64_t, uint64_t>> spans;  // where the bytes of `data` go
  std::vector<uint64_t> offsets;                     // of each header
  uint64_t end;

 private:
  static constexpr size_t kLocal = 30, kExtra = 4, kAlignment = 64;
  Bytes folder_;
  uint64_t hole_;
};

// A record's new place, size and CRC.
struct Moved {
  const Record* record;
  uint64_t offset, size;
  uint32_t crc;
};

// The directory with new entries for the records that moved. False: as above, or one moved twice.
inline bool redirected(const Directory& old, std::vector<Moved> moved, std::string& out) {
  const Bytes data = old.data();
  constexpr size_t kEntry = 46;
  const auto before = [](const Moved& a, const Moved& b) { return a.record->entry < b.record->entry; };
  std::sort(moved.begin(), moved.end(), before);
  out.reserve(data.size());
  size_t position = 0;
  for (const Moved& item : moved) {
    const size_t start = item.record->entry;
    if (start < position || item.offset >= UINT32_MAX || item.size >= UINT32_MAX) return false;
    out.append(data.substr(position, start - position));
    const auto length = [&](size_t at) {
      uint16_t number;
      std::memcpy(&number, data.data() + start + at, sizeof number);
      return number;
    };
    std::string entry(data.substr(start, kEntry + item.record->name));
    put(entry, 8, kUtf8);
    put(entry, 10, uint16_t{0});  // stored
    put(entry, 16, item.crc);
    put(entry, 20, static_cast<uint32_t>(item.size));
    put(entry, 24, static_cast<uint32_t>(item.size));
    put(entry, 30, uint32_t{0});  // no extra field, no comment
    put(entry, 42, static_cast<uint32_t>(item.offset));
    out.append(entry);
    position = start + kEntry + item.record->name + length(30) + length(32);
  }
  out.append(data.substr(position));
  return true;
}

}  // namespace shards
