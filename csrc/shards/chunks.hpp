// The rows of a `.metadata` side by side by name and in the order of their tensor; and its bytes with
// some rows leading elsewhere.

#pragma once

#include <numeric>

#include "metadata.hpp"

namespace shards {

class Chunks {
 public:
  Chunks(const uint8_t* data, size_t size, const Limits& limits) : found_(data, size, limits) {}

  // False: something that Python must judge.
  bool read() { return found_.read() && sort() && match(); }

  const Metadata& found() const { return found_; }
  const std::vector<Row>& rows() const { return found_.rows; }

  // How far the values reach in each file.
  std::vector<uint64_t> ends() const {
    std::vector<uint64_t> out(found_.files.size());
    for (const Row& row : rows()) out[row.file] = std::max(out[row.file], row.start + row.length);
    return out;
  }

  std::vector<uint32_t> firsts;  // of each name, and the end; of names in the order of `order`
  std::vector<uint32_t> order;   // names in the order of their first rows
  std::vector<uint32_t> shapes;  // by row, 1 above the number of a tuple; 0 is not known

  // A place of new bytes in the new file.
  struct Place {
    uint64_t start, length;
  };

  // From which byte on `moved` is not what the pickle is: a frame that holds edits starts there, at
  // the latest.
  uint32_t from(const uint32_t* chosen) const {
    uint32_t first = UINT32_MAX;
    for (size_t k = 0; k < rows().size(); ++k)
      if (chosen[k] != 0) first = std::min(first, spots(rows()[k])[0].at);
    for (const auto& [header, length] : found_.frames)
      if (header < first && first < header + 9 + length) return header;
    return first;
  }

  // The pickle from `base` on, of which `data` are the bytes, where every row with a number in
  // `chosen` lies at that of `places`, counted from 1, in `file`: in pieces, each of which `use`
  // gets. False if `data` is not the pickle that was read.
  template <typename Use>
  bool moved(Bytes data, uint32_t base, const uint32_t* chosen,
                    const std::vector<Place>& places, Bytes file, Use use) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
    std::vector<std::pair<uint32_t, uint32_t>> wanted;  // where the first edit of a row is, and it
    for (uint32_t k = 0; k < rows().size(); ++k) {
      if (chosen[k] > places.size()) return false;
      if (chosen[k] != 0) wanted.emplace_back(spots(rows()[k])[0].at, k);
    }
    std::sort(wanted.begin(), wanted.end());
    const std::string name = text(file);
    std::string out;
    out.reserve(kPiece + (1 << 20));
    size_t frame = 0, position = 0;
    size_t length_at = 0;                // where in `out` the length of the present frame is
    uint64_t length = 0, frame_end = 0;  // that length, and where the frame ends in `data`
    const auto& frames = found_.frames;
    while (frame < frames.size() && frames[frame].first < base) ++frame;
    const auto seal = [&] {
      if (frame_end != 0) std::memcpy(&out[length_at], &length, sizeof length);
      frame_end = 0;
      if (out.size() < kPiece) return;
      use(Bytes(out));
      out.clear();
    };
    const auto upto = [&](size_t end) {
      while (frame < frames.size() && frames[frame].first - base < end) {
        const size_t header = frames[frame].first - base;
        out.append(data, position, header - position);
        seal();
        length_at = out.size() + 1;
        length = frames[frame].second;
        frame_end = header + 9 + length;
        out.append(data, header, 9);
        position = header + 9;
        ++frame;
      }
      out.append(data, position, end - position);
      position = end;
    };
    for (const auto& [_, k] : wanted) {
      if (position >= frame_end) seal();
      const Place& place = places[chosen[k] - 1];
      for (const Spot& spot : spots(rows()[k])) {
        const size_t at = spot.at - base;
        const size_t end = at < data.size() ? after(bytes, data.size(), at) : 0;
        if (end == 0 || at < position) return false;
        const bool stays = spot.what == kPath && rows()[k].path_at & Metadata::kShared;
        upto(stays ? end : at);
        const size_t before = out.size();
        if (stays) out.push_back(static_cast<char>(POP));
        if (spot.what != kPath) {
          integer(out, spot.what == kStart ? place.start : place.length);
        } else {
          out += name;
          const size_t own = at + width(bytes, data.size(), at, kLimits);
          if (!stays) out.append(data, own, end - own);  // its PUT counts
        }
        if (at < frame_end) length += out.size() - before - (end - position);
        position = end;
      }
    }
    upto(data.size());
    seal();
    if (!out.empty()) use(Bytes(out));
    return true;
  }

 private:
  static constexpr size_t kPiece = 16 << 20;
  static constexpr Limits kLimits{0, 0, 0, 4096, 0, 0};
  enum What : uint8_t { kPath, kStart, kLength };
  struct Spot {
    uint32_t at;
    What what;
  };

  static std::array<Spot, 3> spots(const Row& row) {
    std::array<Spot, 3> out{{{row.path_at & ~Metadata::kShared, kPath},
                             {row.start_at, kStart},
                             {row.length_at, kLength}}};
    std::sort(out.begin(), out.end(), [](Spot left, Spot right) { return left.at < right.at; });
    return out;
  }

  // The end of the value at `at`, with its PUT.
  static size_t after(const uint8_t* data, size_t size, size_t at) {
    const size_t bytes = width(data, size, at, kLimits);
    const size_t end = at + bytes;
    if (bytes == 0 || end >= size) return 0;
    if (data[end] != MEMOIZE && data[end] != BINPUT && data[end] != LONG_BINPUT) return end;
    const size_t put = width(data, size, end, kLimits);
    return put == 0 ? 0 : end + put;
  }

  std::string text(Bytes name) const {
    std::string out(1, static_cast<char>(BINUNICODE));
    const uint32_t length = static_cast<uint32_t>(name.size());
    out.append(reinterpret_cast<const char*>(&length), sizeof length);
    return out.append(name);
  }

  static void integer(std::string& out, uint64_t value) {
    size_t bytes = value < 1 << 8 ? 1 : value < 1 << 16 ? 2 : value < 1u << 31 ? 4 : 8;
    out.push_back(static_cast<char>(bytes == 1   ? BININT1
                                    : bytes == 2 ? BININT2
                                    : bytes == 4 ? BININT
                                                 : LONG1));
    if (bytes == 8) out.push_back(8);
    out.append(reinterpret_cast<const char*>(&value), bytes);
  }

  // By the numbers of two tuples, as Python compares them; -1, 0 or 1.
  int before(uint32_t left, uint32_t right) const {
    if (left == right) return 0;
    const auto one = found_.tuples.run(left), other = found_.tuples.run(right);
    return std::lexicographical_compare(one.data, one.data + one.size, other.data,
                                        other.data + other.size)
               ? -1
               : 1;
  }

  // Rows by name, those of one name by their offsets.
  bool sort() {
    std::vector<Row>& rows = found_.rows;
    const size_t names = found_.names.size();
    std::vector<uint32_t> counts(names + 1), at(names);
    for (const Row& row : rows)
      if (counts[row.name]++ == 0) order.push_back(row.name);
    firsts.push_back(0);
    for (const uint32_t name : order) {
      at[name] = firsts.back();
      firsts.push_back(firsts.back() + counts[name]);
    }
    // Each row goes where it belongs, in circles: without a second copy of all.
    std::vector<uint32_t> next = at, home(rows.size());
    for (size_t k = 0; k < rows.size(); ++k) home[k] = next[rows[k].name]++;
    for (size_t k = 0; k < rows.size(); ++k)
      while (home[k] != k) {
        const uint32_t to = home[k];
        std::swap(rows[k], rows[to]);
        std::swap(home[k], home[to]);
      }
    for (size_t n = 0; n + 1 < firsts.size(); ++n) {
      const auto begin = rows.begin() + firsts[n], end = rows.begin() + firsts[n + 1];
      if (end - begin == 1) continue;
      if (std::any_of(begin, end, [](const Row& row) { return row.offset == 0; })) return false;
      const auto less = [this](const Row& left, const Row& right) {
        return before(left.offset - 1, right.offset - 1) < 0;
      };
      if (!std::is_sorted(begin, end, less)) std::sort(begin, end, less);
      for (auto row = begin; row + 1 != end; ++row)
        if (row->offset == (row + 1)->offset) return false;  // one of them is not loaded
    }
    return true;
  }

  // The shape of each chunk, where the tensor names the same chunks as the rows.
  bool match() {
    shapes.resize(found_.rows.size());
    for (size_t n = 0; n < order.size(); ++n) {
      const Whole* whole = whole_of(order[n]);
      const uint32_t first = firsts[n], count = firsts[n + 1] - first;
      if (whole == nullptr || whole->count != count) continue;
      const auto begin = found_.pieces.begin() + whole->first, end = begin + count;
      std::vector<Piece> own(begin, end);
      const auto less = [this](const Piece& left, const Piece& right) {
        return before(left.offset, right.offset) < 0;
      };
      if (!std::is_sorted(own.begin(), own.end(), less)) std::sort(own.begin(), own.end(), less);
      bool same = true;
      for (uint32_t k = 0; k < count; ++k)
        same = same && own[k].offset + 1 == found_.rows[first + k].offset;
      for (uint32_t k = 0; same && k < count; ++k) shapes[first + k] = own[k].shape + 1;
    }
    found_.pieces = {};
    return true;
  }

 public:
  const Whole* whole_of(uint32_t name) const {
    const auto& known = found_.whole_of;
    return name < known.size() && known[name] ? &found_.wholes[known[name] - 1] : nullptr;
  }

 private:
  Metadata found_;
};

}  // namespace shards
