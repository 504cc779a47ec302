// The native half of ckptsurgeon/files/pickles/scan.py and archives/zip_directory.py, on any bytes.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <unordered_map>

#include "chunks.hpp"
#include "directory.hpp"
#include "numbers.hpp"
#include "tail.hpp"
#include "tensors.hpp"

namespace py = pybind11;

namespace {

using shards::Filling;
using shards::Value;

class Places {
 public:
  Places(const py::bytes& data, const shards::Limits& limits)
      : data_(data),
        scan_(reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(data_.ptr())),
              static_cast<size_t>(PyBytes_GET_SIZE(data_.ptr())), limits) {}

  bool walk() { return scan_.walk(); }
  const shards::Scan& scan() const { return scan_; }

  py::object parts(Value value) const {
    const shards::Node* node = scan_.parts(value);
    return node == nullptr ? py::none() : py::object(operands(node->first, node->count));
  }

  py::object grown(Value target) const {
    return fillings(scan_.grown, target, [this](const Filling& filling) -> py::object {
      return operands(filling.first, filling.count);
    });
  }

  py::object built(Value target) const {
    return fillings(scan_.built, target, [this](const Filling& filling) -> py::object {
      return py::int_(scan_.operand(filling.first));
    });
  }

  py::object memo(uint32_t index) const {
    if (index >= scan_.memo.size() || scan_.memo[index] == 0) return py::none();
    return py::int_(scan_.memo[index]);
  }

  py::object alias(Value get) const {
    if (!std::binary_search(scan_.gets.begin(), scan_.gets.end(), get)) return py::none();
    return py::int_(scan_.made(get));
  }

  // (key, start, end) of each number that the dicts in the dict `holder` keep under `name`.
  py::object numbers(Value holder, const std::string& name) const {
    const shards::Numbers numbers(scan_);
    py::list out;
    const bool plain = numbers.each(holder, name, [&](Value key, Value start, Value end) {
      py::object made;
      if (numbers.is_text(key)) {
        made = str(numbers.text(key));
      } else {
        made = py::int_(numbers.integer(key));
      }
      out.append(py::make_tuple(made, start, end));
    });
    return plain ? py::object(out) : py::none();
  }

  py::list frames() const {
    py::list out;
    for (const auto& [header, length] : scan_.frames) out.append(py::make_tuple(header, length));
    return out;
  }

  py::dict gaps() const {
    py::dict out;
    for (const auto& [end, start] : scan_.gaps) out[py::int_(end)] = start;
    return out;
  }

  // `make(dtype, key, numel, offset, size, stride)` for each tensor, where `dtypes` has its storage.
  py::tuple shortened(const py::dict& dtypes, const py::object& make) const {
    py::list tensors;
    std::unordered_map<shards::Bytes, py::object> known;
    std::vector<int64_t> same_size, same_stride;  // most tensors have the shape of the one before
    py::object size = py::tuple(), stride = py::tuple();
    const auto dtype = [&](shards::Bytes storage) -> const py::object& {
      const auto [found, is_new] = known.try_emplace(storage, py::none());
      if (is_new && dtypes.contains(str(storage))) found->second = dtypes[str(storage)];
      return found->second;
    };
    const std::string text = shards::shortened(
        scan_, [&](const shards::Tensor& tensor) { return !dtype(tensor.storage).is_none(); },
        [&](const shards::Tensor& tensor) {
          if (tensor.size != same_size) size = tuple(same_size = tensor.size);
          if (tensor.stride != same_stride) stride = tuple(same_stride = tensor.stride);
          const py::object key = str(tensor.key);
          const py::int_ numel(tensor.numel), offset(tensor.offset);
          PyObject* const words[] = {dtype(tensor.storage).ptr(), key.ptr(), numel.ptr(),
                                     offset.ptr(), size.ptr(), stride.ptr()};
          PyObject* made = PyObject_Vectorcall(make.ptr(), words, 6, nullptr);
          if (made == nullptr) throw py::error_already_set();
          tensors.append(py::reinterpret_steal<py::object>(made));
        });
    return py::make_tuple(py::bytes(text), tensors);
  }

 private:
  static py::str str(shards::Bytes text) { return {text.data(), text.size()}; }

  static py::tuple tuple(const std::vector<int64_t>& numbers) {
    py::tuple out(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i)
      PyTuple_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), py::int_(numbers[i]).release().ptr());
    return out;
  }

  py::list operands(uint32_t first, uint32_t count) const {
    py::list out(count);
    for (uint32_t k = 0; k < count; ++k) out[k] = scan_.operand(first + k);
    return out;
  }

  template <typename Make>
  static py::object fillings(const std::vector<Filling>& all, Value target, Make make) {
    auto found = std::lower_bound(
        all.begin(), all.end(), target,
        [](const Filling& filling, Value wanted) { return filling.target < wanted; });
    if (found == all.end() || found->target != target) return py::none();
    py::list out;
    for (; found != all.end() && found->target == target; ++found)
      out.append(py::make_tuple(found->at, make(*found)));
    return out;
  }

  py::bytes data_;
  shards::Scan scan_;
};

py::object scan(const py::bytes& data, uint64_t opcodes, uint64_t depth, uint64_t integer,
                uint64_t name, uint64_t key, uint64_t long_keys) {
  auto out = std::make_unique<Places>(
      data, shards::Limits{opcodes, depth, integer, name, key, long_keys});
  bool accepted;
  {
    py::gil_scoped_release release;
    accepted = out->walk();
  }
  return accepted ? py::cast(std::move(out)) : py::none();
}

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

  // Size and CRC of each named record; None where there is none.
  py::list sums(const std::vector<std::string>& names) const {
    py::list out(names.size());
    for (size_t k = 0; k < names.size(); ++k) {
      const shards::Record* found = directory_.find(names[k]);
      out[k] = found == nullptr ? py::object(py::none()) : py::make_tuple(found->size, found->crc);
    }
    return out;
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
  py::bytes data_;
  shards::Directory directory_;
  uint64_t offset_;
};

py::object directory(const py::bytes& data, uint64_t count, uint64_t offset) {
  auto out = std::make_unique<Entries>(data, offset);
  if (!out->read(count)) return py::none();
  return py::cast(std::move(out));
}

// A column of the scan as a buffer that keeps it alive.
template <std::vector<Value> shards::Scan::*kColumn>
py::memoryview column(const py::object& places) {
  const auto& values = places.cast<const Places&>().scan().*kColumn;
  static const Value none = 0;
  return py::memoryview::from_buffer(values.empty() ? &none : values.data(), {values.size()},
                                     {sizeof(Value)});
}

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

py::object chunks(const py::bytes& data, uint64_t depth, uint64_t integer, uint64_t name) {
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

}  // namespace

PYBIND11_MODULE(_shards, module) {
  module.doc() = "Torch shards: where the values of a pickle stand, its tensors, and the records.";
  module.def("scan", &scan, py::arg("data"), py::kw_only(), py::arg("opcodes"), py::arg("depth"),
             py::arg("integer"), py::arg("name"), py::arg("key"), py::arg("long_keys"),
             "The places of a pickle that keeps all limits and rules; None for any other.");
  py::class_<Places>(module, "Places")
      .def("parts", &Places::parts)
      .def("grown", &Places::grown)
      .def("built", &Places::built)
      .def("memo", &Places::memo)
      .def("alias", &Places::alias)
      .def("numbers", &Places::numbers, py::arg("holder"), py::arg("name"))
      .def("frames", &Places::frames)
      .def("gaps", &Places::gaps)
      .def("puts", &column<&shards::Scan::puts>, py::keep_alive<0, 1>())
      .def("gets", &column<&shards::Scan::gets>, py::keep_alive<0, 1>())
      .def_property_readonly("root", [](const Places& p) { return p.scan().root; })
      .def_property_readonly("stop", [](const Places& p) { return p.scan().stop; })
      .def("shortened", &Places::shortened, py::arg("dtypes"), py::arg("make"));
  module.def("directory", &directory, py::arg("data"), py::arg("count"), py::arg("offset"),
             "The records of a central directory of plain records; None for any other.");
  py::class_<Entries>(module, "Entries")
      .def("find", &Entries::find)
      .def("names", &Entries::names)
      .def("sums", &Entries::sums, py::arg("names"))
      .def("blanks", &Entries::blanks, py::arg("names"), py::arg("sizes"), py::arg("crcs"),
           py::arg("start"), py::arg("hole"))
      .def("redirected", &Entries::redirected, py::arg("names"), py::arg("offsets"),
           py::arg("sizes"), py::arg("crcs"))
      .def("elements", &Entries::elements, py::arg("descriptor"), py::arg("names"),
           py::arg("widths"))
      .def("__len__", &Entries::size)
      .def_property_readonly("folder", &Entries::folder);
  module.def("chunks", &chunks, py::arg("data"), py::kw_only(), py::arg("depth"),
             py::arg("integer"), py::arg("name"),
             "The chunks of a `.metadata` that is just as torch writes it; None for any other.");
  py::class_<Table>(module, "Table")
      .def("names", &Table::names)
      .def("files", &Table::files)
      .def("globals", &Table::globals)
      .def("wholes", &Table::wholes)
      .def("tuple", &Table::tuple)
      .def("ends", &Table::ends)
      .def("odd_texts", &Table::odd_texts)
      .def("firsts", &table_column<&shards::Chunks::firsts>, py::keep_alive<0, 1>())
      .def("shapes", &table_column<&shards::Chunks::shapes>, py::keep_alive<0, 1>())
      .def("file", &row_column<&shards::Row::file>, py::keep_alive<0, 1>())
      .def("start", &row_column<&shards::Row::start>, py::keep_alive<0, 1>())
      .def("length", &row_column<&shards::Row::length>, py::keep_alive<0, 1>())
      .def("offset", &row_column<&shards::Row::offset>, py::keep_alive<0, 1>())
      .def("first_edit", &Table::first_edit, py::arg("chosen"))
      .def("moved", &Table::moved, py::arg("data"), py::arg("base"), py::arg("chosen"),
           py::arg("places"), py::arg("file"));
}
