// Fuzz target of the event file reader: clang++ -fsanitize=fuzzer,address csrc/events/fuzz.cpp
//
// With -DMUTATE it is a program of its own for compilers without libFuzzer: COUNT SEED-FILE… .

#include <cstdlib>
#include <memory>

#include "file.hpp"

namespace {

// An input as one payload with checksums that hold, so that the message is reached.
std::string framed(events::Bytes payload) {
  std::string record(12, '\0');
  const uint64_t length = payload.size();
  const uint32_t head = events::length_check(length), check = events::masked(payload);
  std::memcpy(&record[0], &length, 8);
  std::memcpy(&record[8], &head, 4);
  record.append(payload);
  record.append(reinterpret_cast<const char*>(&check), 4);
  return record;
}

void read(events::Bytes file) {
  const size_t most = file.size() / events::kFrame + 1;
  // Arrays of just the size that is asked for, on the heap, where a sanitizer sees every step aside.
  const auto copy = std::make_unique<char[]>(file.size());
  if (!file.empty()) std::memcpy(copy.get(), file.data(), file.size());
  file = events::Bytes(copy.get(), file.size());
  std::vector<uint64_t> offsets(most);
  std::vector<int64_t> steps(most);
  std::vector<double> walls(most);
  std::vector<int32_t> tags(most);
  std::vector<uint8_t> kinds(most);
  events::Groups groups;
  uint64_t end = 0;
  const size_t count = events::index(
      file, {offsets.data(), steps.data(), walls.data(), tags.data(), kinds.data()}, groups, end);
  if (end > file.size() || count > most) std::abort();
  for (size_t i = 0; i < count; ++i)
    if (tags[i] >= static_cast<int32_t>(groups.names().size())) std::abort();
  events::NewName name{std::string(200, 'n')};
  const auto target = [&](events::Bytes tag) { return tag.size() % 2 ? &name : nullptr; };
  std::string out;
  uint64_t at = 0, before = 1;
  while (at != before) {
    before = at;
    out.clear();
    at = events::rename(file, at, 64, target, out);
    if (at > file.size()) std::abort();
  }
  // Renaming reads what the index reads.
  if (at != end) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const events::Bytes input(reinterpret_cast<const char*>(data), size);
  read(input);
  read(framed(input));
  return 0;
}

#ifdef MUTATE

#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>

int main(int count, char** words) {
  if (count < 3) return 2;
  std::vector<std::string> seeds;
  for (int i = 2; i < count; ++i) {
    std::ifstream file(words[i], std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  const long wanted = std::atol(words[1]);
  std::mt19937 dice(1869);
  const auto roll = [&](size_t sides) { return static_cast<size_t>(dice() % sides); };
  for (long i = 0; i < wanted; ++i) {
    std::string data = seeds[roll(seeds.size())];
    if (i % 2) data = data.substr(12);  // a payload: LLVMFuzzerTestOneInput frames it
    for (size_t edits = roll(4); edits && !data.empty(); --edits) {
      const size_t at = roll(data.size());
      switch (roll(4)) {
        case 0: data[at] = static_cast<char>(data[at] ^ (1 << roll(8))); break;
        case 1: data[at] = static_cast<char>("\x0a\x09\x10\x2a\x7f\x80\xff\x00"[roll(8)]); break;
        case 2: data.erase(at, roll(12)); break;
        default: data.insert(at, roll(11), static_cast<char>(roll(2) ? 0x80 : 0xff)); break;
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(data.data()), data.size());
  }
  std::printf("%ld mutations\n", wanted);
  return 0;
}

#endif
