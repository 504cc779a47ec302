// The native half of event_file.py (`index`) and renaming.py (`Renaming`) in
// ckptsurgeon/logs/tensorboard/, on any buffer.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <string>
#include <unordered_map>

#include "file.hpp"

namespace py = pybind11;

namespace {

events::Bytes view(const py::buffer_info& info) {
  return {static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

// A bytes object that is filled in place. It is made for the most records that the file can have;
// pages that are never touched cost nothing, and `cut` gives the rest back.
template <typename T>
class Column {
 public:
  explicit Column(size_t most)
      : object_(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(most * sizeof(T)))) {
    if (object_ == nullptr) throw py::error_already_set();
  }
  T* data() { return reinterpret_cast<T*>(PyBytes_AS_STRING(object_)); }
  py::object cut(size_t count) {
    if (_PyBytes_Resize(&object_, static_cast<Py_ssize_t>(count * sizeof(T))) != 0)
      throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object_);
  }

 private:
  PyObject* object_;
};

py::tuple index_of(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  const events::Bytes file = view(info);
  const size_t most = file.size() / events::kFrame + 1;
  Column<uint64_t> offsets(most);
  Column<int64_t> steps(most);
  Column<double> walls(most);
  Column<int32_t> tags(most);
  Column<uint8_t> kinds(most);
  events::Groups groups;
  const events::Columns columns{offsets.data(), steps.data(), walls.data(), tags.data(),
                                kinds.data()};
  uint64_t end = 0;
  size_t count = 0;
  {
    py::gil_scoped_release release;
    count = events::index(file, columns, groups, end);
  }
  py::list names;
  for (const auto& group : groups.names()) {
    py::tuple row(group.size());
    for (size_t i = 0; i < group.size(); ++i) row[i] = py::bytes(group[i]);
    names.append(row);
  }
  return py::make_tuple(end, offsets.cut(count), steps.cut(count), walls.cut(count),
                        tags.cut(count), kinds.cut(count), names);
}

// New names by tag, asked of Python once per tag, and how many events got them.
class Renaming {
 public:
  Renaming(py::function name, py::function elsewhere)
      : name_(std::move(name)), elsewhere_(std::move(elsewhere)) {}

  // Bytes that replace [at, next), or None when they stay, and next.
  py::tuple run(const py::buffer& buffer, uint64_t at, uint64_t limit) {
    const py::buffer_info info = buffer.request();
    const events::Bytes file = view(info);
    if (at > file.size()) throw py::value_error("the offset lies after the end");
    out_.clear();
    const uint64_t next = events::rename(
        file, at, limit, [this](events::Bytes tag) { return target(tag); }, out_);
    if (out_.empty()) return py::make_tuple(py::none(), next);
    return py::make_tuple(py::bytes(out_), next);
  }

  py::dict counts() const {
    py::dict result;
    for (const Entry& entry : entries_)
      if (!entry.elsewhere) result[py::bytes(entry.tag)] = entry.name.count;
    return result;
  }

 private:
  struct Entry {
    std::string tag;
    bool stays = true;
    bool elsewhere = false;
    events::NewName name;
    size_t next = 0;  // the tag that came after this one the last time
  };

  events::NewName* target(events::Bytes tag) {
    if (last_ < entries_.size()) {
      const size_t guess = entries_[last_].next;
      if (entries_[guess].tag == tag) return met(guess);
    }
    auto found = known_.find(tag);
    if (found == known_.end()) {
      const py::bytes asked(tag.data(), tag.size());
      Entry entry;
      entry.tag = std::string(tag);
      entry.elsewhere = elsewhere_(asked).cast<bool>();
      if (!entry.elsewhere) {
        const py::object answer = name_(asked);
        entry.stays = answer.is_none();
        if (!entry.stays) entry.name.text = answer.cast<std::string>();
      }
      entries_.push_back(std::move(entry));
      found = known_.emplace(entries_.back().tag, entries_.size() - 1).first;
    }
    if (last_ < entries_.size()) entries_[last_].next = found->second;
    return met(found->second);
  }

  events::NewName* met(size_t number) {
    last_ = number;
    Entry& entry = entries_[number];
    if (entry.elsewhere) throw events::Elsewhere();
    return entry.stays ? nullptr : &entry.name;
  }

  py::function name_, elsewhere_;
  std::deque<Entry> entries_;  // never moves: `known_` looks at its tags
  std::unordered_map<events::Bytes, size_t> known_;
  size_t last_ = static_cast<size_t>(-1);
  std::string out_;
};

}  // namespace

PYBIND11_MODULE(_events, module) {
  module.doc() = "Event file records: an index of them, and their bytes under new tags.";
  module.attr("hardware") = events::has_crc32c();
  module.def("index", &index_of, py::arg("buffer"),
             "End of the last good record, its columns as bytes, and the tags of each number.");
  module.def("by_table", [](const py::bytes& data) {
    const events::Bytes bytes = data;
    return events::crc32c_by_table(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  });
  module.def("masked", [](const py::bytes& data) { return events::masked(events::Bytes(data)); });
  py::class_<Renaming>(module, "Renaming")
      .def(py::init<py::function, py::function>(), py::arg("name"), py::arg("elsewhere"))
      .def("run", &Renaming::run, py::arg("buffer"), py::arg("at"), py::arg("limit"))
      .def_property_readonly("counts", &Renaming::counts);
}
