// What Python asks of the scan of a pickle: the native half of ckptsurgeon/files/pickles/scan.py.

#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "numbers.hpp"
#include "tensors.hpp"

namespace shards::python {

namespace py = pybind11;

// Makes instances of a class that has no more than slots, as `object.__new__` and an assignment to
// each do: its `__init__` takes ten times as long. Their values lead to no object that leads back, so
// the garbage collector need not visit them, of which a step has ten thousand.
template <size_t kCount>
class Slots {
 public:
  Slots(const py::type& kind, const std::array<const char*, kCount>& names) : kind_(kind) {
    for (size_t k = 0; k < kCount; ++k) {
      const py::object slot = kind.attr(names[k]);
      if (Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) throw py::type_error(names[k]);
      const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member;
      if (member->type != T_OBJECT_EX) throw py::type_error(names[k]);
      offsets_[k] = member->offset;
    }
  }

  py::object make(std::array<py::object, kCount> values) const {
    auto* type = reinterpret_cast<PyTypeObject*>(kind_.ptr());
    auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));  // its slots are null
    if (!made) throw py::error_already_set();
    if (PyObject_GC_IsTracked(made.ptr())) PyObject_GC_UnTrack(made.ptr());
    auto* start = reinterpret_cast<char*>(made.ptr());
    for (size_t k = 0; k < kCount; ++k)
      *reinterpret_cast<PyObject**>(start + offsets_[k]) = values[k].release().ptr();
    return made;
  }

 private:
  py::type kind_;
  std::array<Py_ssize_t, kCount> offsets_;
};

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

  // The text, and a `kind` of dtype, key, numel, offset, size, stride and whether it is whole for
  // each tensor, where `dtypes` has its storage.
  py::tuple shortened(const py::dict& dtypes, const py::type& kind) const {
    py::list tensors;
    const Slots<7> slots(
        kind, {"dtype", "storage", "storage_numel", "offset", "size", "stride", "whole"});
    std::unordered_map<shards::Bytes, py::object> known;
    std::pair<shards::Bytes, const py::object*> last;  // most tensors have the dtype of the one before
    std::vector<int64_t> same_size, same_stride;  // most tensors have the shape of the one before
    py::object size = py::tuple(), stride = py::tuple();
    const auto dtype = [&](shards::Bytes storage) -> const py::object& {
      if (last.second == nullptr || last.first != storage) {
        const auto [found, is_new] = known.try_emplace(storage, py::none());
        if (is_new && dtypes.contains(str(storage))) found->second = dtypes[str(storage)];
        last = {storage, &found->second};
      }
      return *last.second;
    };
    const std::string text = shards::shortened(
        scan_, [&](const shards::Tensor& tensor) { return !dtype(tensor.storage).is_none(); },
        [&](const shards::Tensor& tensor) {
          if (tensor.size != same_size) size = tuple(same_size = tensor.size);
          if (tensor.stride != same_stride) stride = tuple(same_stride = tensor.stride);
          const py::int_ numel(tensor.numel), offset(tensor.offset);
          tensors.append(slots.make({dtype(tensor.storage), str(tensor.key), numel, offset, size,
                                     stride, py::bool_(tensor.whole())}));
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

inline py::object scan(const py::bytes& data, uint64_t opcodes, uint64_t depth, uint64_t integer,
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

// A column of the scan as a buffer that keeps it alive.
template <shards::Column<Value> shards::Scan::*kColumn>
py::memoryview column(const py::object& places) {
  const auto& values = places.cast<const Places&>().scan().*kColumn;
  static const Value none = 0;
  return py::memoryview::from_buffer(values.empty() ? &none : values.begin(), {values.size()},
                                     {sizeof(Value)});
}

}  // namespace shards::python
