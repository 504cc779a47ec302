// Different runs of bytes or integers, each with a number, in a table that no file can make slow.

#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace shards {

template <typename Element>
class Numbered {
 public:
  struct Run {
    const Element* data;
    size_t size;
  };

  // So many bytes may all runs have, with 16 more for each.
  explicit Numbered(size_t room) : room_(room) {}

  // The number of this run, a new one if it was not there. False: there is no room, or the hashes
  // collide as no trainer's do.
  bool number(const Element* first, size_t count, uint32_t& out) {
    if (2 * (ends_.size() + 1) > table_.size()) grow();
    const std::string_view bytes = view(first, count);
    size_t slot;
    if (find(bytes, slot, out)) return out != kCollides;
    used_ += bytes.size() + 16;
    if (used_ > room_) return false;
    out = static_cast<uint32_t>(ends_.size());
    all_.insert(all_.end(), first, first + count);
    ends_.push_back(all_.size());
    table_[slot & (table_.size() - 1)] = out + 1;
    return true;
  }

  static constexpr uint32_t kCollides = UINT32_MAX;

  // Whether this run was there, and its number; kCollides where the hashes collide.
  bool known(const Element* first, size_t count, uint32_t& out) {
    size_t slot;
    return !table_.empty() && find(view(first, count), slot, out);
  }

  size_t size() const { return ends_.size(); }

  Run run(uint32_t number) const {
    const size_t begin = number ? ends_[number - 1] : 0;
    return {all_.data() + begin, ends_[number] - begin};
  }

 private:
  static std::string_view view(const Element* first, size_t count) {
    return {reinterpret_cast<const char*>(first), count * sizeof(Element)};
  }

  static size_t hash(std::string_view bytes) { return std::hash<std::string_view>{}(bytes); }

  // The slot of these bytes, and their number where they have one.
  bool find(std::string_view bytes, size_t& slot, uint32_t& out) {
    for (slot = hash(bytes); const uint32_t other = table_[slot & (table_.size() - 1)]; ++slot) {
      const Run there = run(other - 1);
      if (view(there.data, there.size) == bytes) {
        out = other - 1;
        return ++asked_ > 0;
      }
      if (++steps_ > 64 * (asked_ + ends_.size()) + 4096) {
        out = kCollides;
        return true;
      }
    }
    return false;
  }

  void grow() {
    table_.assign(table_.empty() ? 64 : 2 * table_.size(), 0);
    for (uint32_t k = 0; k < ends_.size(); ++k) {
      const Run known = run(k);
      size_t slot = hash(view(known.data, known.size));
      // No steps are counted: they are at most those of the smaller table for each key, and the
      // table doubles.
      while (table_[slot & (table_.size() - 1)] != 0) ++slot;
      table_[slot & (table_.size() - 1)] = k + 1;
    }
  }

  std::vector<Element> all_;
  std::vector<uint64_t> ends_;
  std::vector<uint32_t> table_;  // by hash, a number and 1; 0 is none
  size_t room_, used_ = 0, steps_ = 0, asked_ = 0;
};

}  // namespace shards
