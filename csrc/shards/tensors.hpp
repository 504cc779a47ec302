// Finds the tensors of a scanned pickle that `torch.save` wrote as it writes nearly all of them, so
// that a reader gets each by one opcode instead of thirty and four calls.

#pragma once

#include <string>

#include "scan.hpp"

namespace shards {

constexpr uint8_t kNextBuffer = 0x97;  // no scanned pickle has it

// [start, end) makes a tensor and nothing that is read elsewhere: no global is named in it.
struct Tensor {
  Value start, end;
  Bytes storage, key;  // "FloatStorage", "17"
  int64_t numel, offset;
  std::vector<int64_t> size, stride;

  // It has all elements of its storage, row after row, and there are some.
  bool whole() const {
    __extension__ __int128 count = 1;
    for (size_t axis = size.size(); axis-- > 0; count *= size[axis])
      if (stride[axis] != count || size[axis] <= 0 || count > numel) return false;
    return offset == 0 && numel > 0 && count == numel;
  }
};

class Tensors {
 public:
  static constexpr uint32_t kAxes = 64;  // torch has no more

  explicit Tensors(const Scan& scan) : scan_(scan) {
    last_read_.resize(scan.memo.size());
    for (const Value get : scan.gets) last_read_[scan.index_of_get(get)] = get;
  }

  // Call `use(tensor)` for each, ascending. The pickle must be of protocol 2 or 3.
  template <typename Use>
  void each(Use use) {
    // What is popped, or counted by the memo, can't be left out.
    if (!scan_.gaps.empty() || scan_.counted) return;
    Tensor tensor;
    size_t put = 0;
    for (const Node& node : scan_.nodes) {
      if (!matches(node, tensor)) continue;
      while (put < scan_.puts.size() && scan_.puts[put] < tensor.start) ++put;
      bool alone = !filled(scan_.grown, tensor) && !filled(scan_.built, tensor);
      for (; put < scan_.puts.size() && scan_.puts[put] < tensor.end; ++put)
        alone = alone && last_read_[index_of_put(scan_.puts[put])] < tensor.end;
      if (alone) use(tensor);
    }
  }

 private:
  // _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict())
  bool matches(const Node& node, Tensor& out) {
    if (scan_.op(node.at) != REDUCE) return false;
    present_ = &node;
    if (!global(part(node, 0), "torch._utils\n_rebuild_tensor_v2\n")) return false;
    const Node* args = made_by(part(node, 1), TUPLE, 7);
    if (args == nullptr) return false;
    const Node* hooks = made_by(part(*args, 6), REDUCE, 2);
    if (hooks == nullptr || !global(part(*hooks, 0), "collections\nOrderedDict\n") ||
        scan_.op(part(*hooks, 1)) != EMPTY_TUPLE)
      return false;
    // From the last to the first, so that `made` has no more to pass over than what is known.
    const uint8_t grad = scan_.op(part(*args, 5));
    if ((grad != NEWTRUE && grad != NEWFALSE) || !shape(part(*args, 4), out.stride) ||
        !shape(part(*args, 3), out.size) || out.size.size() != out.stride.size() ||
        !integer(part(*args, 2), out.offset) || !storage(part(*args, 1), out))
      return false;
    out.start = part(node, 0);  // a GET
    out.end = node.at + 1;
    return true;
  }

  // The persistent id ("storage", torch.FloatStorage, "17", "cpu", numel).
  bool storage(Value value, Tensor& out) const {
    const Node* id = made_by(value, BINPERSID, 1);
    const Node* saved = id == nullptr ? nullptr : made_by(part(*id, 0), TUPLE, 6);
    if (saved == nullptr || !Scan::is_get(scan_.op(part(*saved, 1))) ||
        text(part(*saved, 1)) != "storage" || !Scan::is_get(scan_.op(part(*saved, 4))) ||
        !is_text(part(*saved, 4)))
      return false;
    const Bytes kind = global(part(*saved, 2));
    const Bytes module = "torch\n";
    if (kind.substr(0, module.size()) != module) return false;
    out.storage = kind.substr(module.size(), kind.size() - module.size() - 1);
    out.key = text(part(*saved, 3));
    for (const char letter : out.key)
      if (letter <= 0) return false;
    return !out.key.empty() && integer(part(*saved, 5), out.numel) && out.numel >= 0;
  }

  Value part(const Node& node, uint32_t k) const { return scan_.operand(node.first + k); }

  // The node of a value that is made on the spot by `op` of `count` operands.
  const Node* made_by(Value value, Op op, uint32_t count) const {
    if (scan_.op(value) != op) return nullptr;
    const Node* node = made(value);
    return node->count == count ? node : nullptr;
  }

  // The node of a value that is a part, or a part of a part, of the present one: a few before it.
  const Node* made(Value value) const {
    const Node* node = present_;
    while (node->at != value) --node;
    return node;
  }

  // Module and name, a line each, of a global that is read from the memo; empty if it is none.
  Bytes global(Value value) const {
    if (!Scan::is_get(scan_.op(value))) return {};
    const Value made = scan_.made(value);
    if (scan_.op(made) != GLOBAL) return {};
    const Bytes rest(reinterpret_cast<const char*>(scan_.bytes(made + 1)), scan_.stop - made - 1);
    return rest.substr(0, rest.find('\n', rest.find('\n') + 1) + 1);  // the scan has found both
  }

  bool global(Value value, Bytes name) const { return global(value) == name; }

  bool is_text(Value value) const {
    const uint8_t op = scan_.op(scan_.made(value));
    return op == BINUNICODE || op == SHORT_BINUNICODE;
  }

  Bytes text(Value value) const {
    if (!is_text(value)) return {};
    const Value made = scan_.made(value);
    uint32_t length = 0;
    const size_t width = scan_.op(made) == BINUNICODE ? 4 : 1;
    std::memcpy(&length, scan_.bytes(made + 1), width);
    return Bytes(reinterpret_cast<const char*>(scan_.bytes(made + 1)) + width, length);
  }

  // A number on the spot of at most eight bytes.
  bool integer(Value value, int64_t& out) const {
    const uint8_t* at = scan_.bytes(value + 1);
    switch (scan_.op(value)) {
      case BININT1: out = at[0]; return true;
      case BININT2: out = at[0] | at[1] << 8; return true;
      case BININT: {
        int32_t number;
        std::memcpy(&number, at, sizeof number);
        out = number;
        return true;
      }
      case LONG1: {
        const size_t length = at[0];
        if (length > 8) return false;
        uint64_t number = length && at[length] & 0x80 ? ~uint64_t{0} : 0;  // its sign
        std::memcpy(&number, at + 1, length);
        out = static_cast<int64_t>(number);
        return true;
      }
      default: return false;
    }
  }

  bool shape(Value value, std::vector<int64_t>& out) const {
    out.clear();
    const uint8_t op = scan_.op(value);
    if (op == EMPTY_TUPLE) return true;
    if (op != TUPLE && op != TUPLE1 && op != TUPLE2 && op != TUPLE3) return false;
    const Node* node = made(value);
    if (node->count > kAxes) return false;
    for (uint32_t k = op == TUPLE; k < node->count; ++k) {
      int64_t number;
      if (!integer(part(*node, k), number)) return false;
      out.push_back(number);
    }
    return true;
  }

  bool filled(const std::vector<Filling>& fillings, const Tensor& tensor) const {
    const auto found = std::lower_bound(
        fillings.begin(), fillings.end(), tensor.start,
        [](const Filling& filling, Value start) { return filling.target < start; });
    return found != fillings.end() && found->target < tensor.end - 1;
  }

  uint32_t index_of_put(Value put) const {
    if (scan_.op(put) == BINPUT) return *scan_.bytes(put + 1);
    uint32_t index;
    std::memcpy(&index, scan_.bytes(put + 1), sizeof index);
    return index;
  }

  const Scan& scan_;
  std::vector<Value> last_read_;  // by memo index
  const Node* present_ = nullptr;
};

// The pickle up to its STOP with NEXT_BUFFER, which takes the next of what the unpickler was given,
// for each of the tensors that `wanted` says; `use` gets these in that order.
template <typename Wanted, typename Use>
std::string shortened(const Scan& scan, Wanted wanted, Use use) {
  std::string out;
  Value position = 0;
  const auto upto = [&](size_t end) {
    out.append(reinterpret_cast<const char*>(scan.bytes(position)), end - position);
  };
  Tensors(scan).each([&](const Tensor& tensor) {
    if (!wanted(tensor)) return;
    upto(tensor.start);
    out.push_back(static_cast<char>(kNextBuffer));
    position = tensor.end;
    use(tensor);
  });
  upto(scan.stop);
  return out;
}

}  // namespace shards
