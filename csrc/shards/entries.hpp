// What Python asks of a central directory: the native half of
// ckptsurgeon/files/archives/zip_directory.py.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "directory.hpp"
#include "tail.hpp"

namespace shards::python {

namespace py = pybind11;

// The directory that Python asks for one record at a time.
class Entries {
 public:
  Entries(const py::bytes& data, uint64_t offset)
      : data_(data), directory_(shards::Bytes(data_)), offset_(offset) {}

  bool read(uint64_t count) { return directory_.read(count, offset_); }

  shards::Bytes folder() const { return directory_.folder.substr(0, directory_.folder.size() - 1); }

  py::object find(const std::string& name) const {
    const shards::Record* found = directory_.find(name);
    if (found == nullptr) return py::none();
    return py::make_tuple(found->offset, found->size, found->crc, found->flags, found->entry);
  }

  py::list names() const {
    py::list out;
    for (const auto& record : directory_.records) {
      const shards::Bytes name = directory_.name(record);
      out.append(py::str(name.data(), name.size()));
    }
    return out;
  }

  size_t size() const { return directory_.records.size(); }

  // Size and CRC of the record of each tensor's `storage`, 8 bytes each; all ones without a record.
  py::bytes sums(const py::list& tensors) const {
    std::vector<uint64_t> out(2 * tensors.size(), UINT64_MAX);
    std::string name = kData;
    const py::str attribute("storage");
    for (size_t k = 0; k < tensors.size(); ++k) {
      const py::object key = tensors[k].attr(attribute);
      Py_ssize_t length = 0;
      const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &length);
      if (text == nullptr) throw py::error_already_set();
      name.replace(kData.size(), std::string::npos, text, static_cast<size_t>(length));
      const shards::Record* found = directory_.find(name);
      if (found == nullptr) continue;
      out[2 * k] = found->size;
      out[2 * k + 1] = found->crc;
    }
    return {reinterpret_cast<const char*>(out.data()), out.size() * sizeof out[0]};
  }

  // The bytes of new records of zeros, where they go, and where each begins; None for Python.
  py::object blanks(const std::vector<std::string>& names, const std::vector<uint64_t>& sizes,
                    const std::vector<uint32_t>& crcs, uint64_t start, uint64_t hole) const {
    shards::Blanks out(directory_.folder, start, hole);
    for (size_t k = 0; k < names.size(); ++k)
      if (!out.add(names[k], sizes.at(k), crcs.at(k))) return py::none();
    return py::make_tuple(py::bytes(out.data), out.spans, out.offsets, out.end);
  }

  // The directory with these records moved; None for Python.
  py::object redirected(const std::vector<std::string>& names, const std::vector<uint64_t>& offsets,
                        const std::vector<uint64_t>& sizes,
                        const std::vector<uint32_t>& crcs) const {
    std::vector<shards::Moved> moved;
    for (size_t k = 0; k < names.size(); ++k) {
      const shards::Record* found = directory_.find(names[k]);
      if (found == nullptr) return py::none();
      moved.push_back({found, offsets.at(k), sizes.at(k), crcs.at(k)});
    }
    std::string out;
    if (!shards::redirected(directory_, std::move(moved), out)) return py::none();
    return py::bytes(out);
  }

  // The bytes of each named record of the file `descriptor` that has `widths` of them; None where
  // Python must read, or judge.
  py::list elements(int descriptor, const std::vector<std::string>& names,
                    const std::vector<uint32_t>& widths) const {
    py::list out;
    char block[512];
    for (size_t k = 0; k < names.size(); ++k) {
      const shards::Record* record = directory_.find(names[k]);
      size_t start = 0;
      if (record != nullptr && record->size == widths.at(k) && record->offset < offset_) {
        const size_t room = std::min<uint64_t>(sizeof block, offset_ - record->offset);
        const ssize_t got = pread(descriptor, block, room, static_cast<off_t>(record->offset));
        if (got > 0) start = directory_.payload(*record, {block, static_cast<size_t>(got)});
      }
      out.append(start == 0 ? py::object(py::none()) : py::bytes(block + start, record->size));
    }
    return out;
  }

 private:
  inline static const std::string kData = "data/";
  py::bytes data_;
  shards::Directory directory_;
  uint64_t offset_;
};

inline py::object directory(const py::bytes& data, uint64_t count, uint64_t offset) {
  auto out = std::make_unique<Entries>(data, offset);
  if (!out->read(count)) return py::none();
  return py::cast(std::move(out));
}

}  // namespace shards::python
