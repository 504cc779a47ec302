// A vector of plain values to which one is added by a comparison and a store. A pickle has hundreds
// of thousands, and the call that std::vector makes for each takes longer than the rest of its scan.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

namespace shards {

template <typename Element>
class Column {
  static_assert(std::is_trivially_copyable_v<Element>);

 public:
  // Room for so many, which takes memory once they are there.
  void reserve(size_t count) {
    if (count <= room_) return;
    std::unique_ptr<Element[]> grown(new Element[count]);
    if (size_ != 0) std::memcpy(grown.get(), all_.get(), size_ * sizeof(Element));
    all_ = std::move(grown);
    room_ = count;
  }

  [[gnu::always_inline]] void push_back(Element element) {
    if (size_ == room_) grow();
    all_[size_++] = element;
  }

  void pop_back() { --size_; }

  // What is new is zero.
  void resize(size_t count) {
    if (count > room_) reserve(std::max(count, 2 * room_));
    if (count > size_) std::fill(all_.get() + size_, all_.get() + count, Element{});
    size_ = count;
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Element& back() { return all_[size_ - 1]; }
  Element& operator[](size_t k) { return all_[k]; }
  const Element& operator[](size_t k) const { return all_[k]; }
  const Element* begin() const { return all_.get(); }
  const Element* end() const { return all_.get() + size_; }

 private:
  [[gnu::noinline]] void grow() { reserve(2 * room_ + 64); }

  std::unique_ptr<Element[]> all_;
  size_t size_ = 0, room_ = 0;
};

}  // namespace shards
