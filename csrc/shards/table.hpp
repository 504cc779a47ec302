// What Python asks of the chunks of a `.metadata`: the native half of
// ckptsurgeon/files/dcp_metadata.py.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chunks.hpp"

namespace shards::python {

namespace py = pybind11;

// The chunks that a `.metadata` names; no byte of it is kept.
class Table {
 public:
  Table(shards::Bytes data, const shards::Limits& limits)
      : chunks_(reinterpret_cast<const uint8_t*>(data.data()), data.size(), limits) {}

  bool read() { return chunks_.read(); }
  const shards::Chunks& chunks() const { return chunks_; }

  py::list names() const {
    py::list out;
    for (const uint32_t name : chunks_.order) out.append(run(chunks_.found().names, name));
    return out;
  }
  py::list files() const { return all(chunks_.found().files); }
  py::list globals() const { return all(chunks_.found().globals); }
  const std::set<std::string>& members() const { return chunks_.found().members; }
  py::list wholes() const {
    py::list out;
    for (const uint32_t name : chunks_.order) {
      const shards::Whole* whole = chunks_.whole_of(name);
      const bool known = whole != nullptr && whole->dtype != 0 && whole->size != 0;
      out.append(!known ? py::object(py::none())
                        : py::make_tuple(run(chunks_.found().globals, whole->dtype - 1),
                                         tuple(whole->size - 1)));
    }
    return out;
  }
  py::tuple tuple(uint32_t number) const {
    if (number >= chunks_.found().tuples.size()) throw py::index_error();
    const auto found = chunks_.found().tuples.run(number);
    py::tuple out(found.size);
    for (size_t k = 0; k < found.size; ++k) out[k] = found.data[k];
    return out;
  }
  std::vector<uint64_t> ends() const { return chunks_.ends(); }
  py::list odd_texts() const {
    py::list out;
    for (const auto& [at, length] : chunks_.found().odd_texts) out.append(py::make_tuple(at, length));
    return out;
  }

  uint32_t first_edit(const py::buffer& chosen) const { return chunks_.from(numbers(chosen).data()); }

  py::object moved(const py::bytes& data, uint32_t base, const py::buffer& chosen,
                   const std::vector<std::pair<uint64_t, uint64_t>>& places,
                   const std::string& file) const {
    std::vector<shards::Chunks::Place> all;
    for (const auto& [start, length] : places) all.push_back({start, length});
    py::list out;
    const bool done =
        chunks_.moved(shards::Bytes(data), base, numbers(chosen).data(), all, file,
                      [&](shards::Bytes piece) { out.append(py::bytes(piece.data(), piece.size())); });
    return done ? py::object(out) : py::none();
  }

 private:
  template <typename Numbered>
  static py::bytes run(const Numbered& all, uint32_t number) {
    const auto found = all.run(number);
    return {found.data, found.size};
  }
  template <typename Numbered>
  static py::list all(const Numbered& numbered) {
    py::list out;
    for (uint32_t k = 0; k < numbered.size(); ++k) out.append(run(numbered, k));
    return out;
  }

  // One for each row.
  struct Numbers {
    py::buffer_info info;
    const uint32_t* data() const { return static_cast<const uint32_t*>(info.ptr); }
  };
  Numbers numbers(const py::buffer& buffer) const {
    Numbers out{buffer.request()};
    if (out.info.itemsize != 4 || out.info.size != static_cast<py::ssize_t>(chunks_.rows().size()))
      throw py::value_error("there is a number for each row");
    return out;
  }

  shards::Chunks chunks_;
};

inline py::object chunks(const py::bytes& data, uint64_t depth, uint64_t integer, uint64_t name) {
  auto out = std::make_unique<Table>(shards::Bytes(data),
                                     shards::Limits{0, depth, integer, name, 0, 0});
  bool accepted;
  {
    py::gil_scoped_release release;
    accepted = out->read();
  }
  return accepted ? py::cast(std::move(out)) : py::none();
}

// One number of every row as a buffer that keeps the table alive.
template <auto kMember>
py::memoryview row_column(const py::object& table) {
  const auto& rows = table.cast<const Table&>().chunks().rows();
  static const shards::Row none{};
  return py::memoryview::from_buffer(rows.empty() ? &(none.*kMember) : &(rows[0].*kMember),
                                     {rows.size()}, {sizeof(shards::Row)});
}

template <std::vector<uint32_t> shards::Chunks::*kColumn>
py::memoryview table_column(const py::object& table) {
  const auto& values = table.cast<const Table&>().chunks().*kColumn;
  static const uint32_t none = 0;
  return py::memoryview::from_buffer(values.empty() ? &none : values.data(), {values.size()},
                                     {sizeof(uint32_t)});
}

}  // namespace shards::python
