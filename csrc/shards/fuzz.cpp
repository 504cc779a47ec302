// Fuzz target of the shard reader: clang++ -fsanitize=fuzzer,address csrc/shards/fuzz.cpp
//
// With -DMUTATE it is a program of its own for compilers without libFuzzer: COUNT SEED-FILE… .

#include <cstdlib>
#include <memory>
#include <string>

#include "chunks.hpp"
#include "directory.hpp"
#include "numbers.hpp"
#include "tail.hpp"
#include "tensors.hpp"

namespace {

using shards::Bytes;

void pickle(const uint8_t* data, size_t size) {
  shards::Scan scan(data, size, {2000, 50, 4096, 4096, 100, 100});
  if (!scan.walk()) return;
  if (scan.stop > size || scan.root >= size) std::abort();
  for (const shards::Value get : scan.gets)
    if (scan.made(get) == 0 || scan.made(get) >= get) std::abort();
  for (const shards::Node& node : scan.nodes)
    if (scan.parts(node.at) != &node || scan.start(node.at) > node.at) std::abort();
  const shards::Numbers numbers(scan);
  for (shards::Value value = 0; value < scan.stop; ++value)
    numbers.each(value, "step", [&](shards::Value key, shards::Value start, shards::Value end) {
      if (end > scan.stop || start >= end) std::abort();
      if (numbers.is_text(key) && numbers.text(key).size() > size) std::abort();
    });
  size_t count = 0;
  const std::string text = shards::shortened(
      scan, [](const shards::Tensor& tensor) { return tensor.storage.size() % 2 == 0; },
      [&count](const shards::Tensor&) { ++count; });
  if (text.size() + 30 * count > scan.stop) std::abort();
}

void metadata(const uint8_t* data, size_t size) {
  shards::Chunks chunks(data, size, {0, 50, 4096, 4096, 0, 0});
  if (!chunks.read()) return;
  std::vector<uint32_t> chosen;
  for (const shards::Row& row : chunks.rows()) {
    if (row.file >= chunks.found().files.size() || row.offset > chunks.found().tuples.size())
      std::abort();
    chosen.push_back(static_cast<uint32_t>(chosen.size() % 3));
  }
  for (const uint32_t shape : chunks.shapes)
    if (shape > chunks.found().tuples.size()) std::abort();
  const uint32_t base = chunks.from(chosen.data());
  if (base >= size) return;  // nothing was chosen
  const Bytes rest(reinterpret_cast<const char*>(data) + base, size - base);
  std::string moved(reinterpret_cast<const char*>(data), base);
  const auto use = [&moved](Bytes piece) { moved += piece; };
  if (!chunks.moved(rest, base, chosen.data(), {{7, 9}, {1 << 20, 70'000}}, "new", use)) return;
  shards::Chunks again(reinterpret_cast<const uint8_t*>(moved.data()), moved.size(),
                       {0, 50, 4096, 4096, 0, 0});
  if (!again.read() || again.rows().size() != chunks.rows().size()) std::abort();
}

// Every record as zeros after the directory, and a directory that says so.
void tail(const shards::Directory& directory, uint64_t count) {
  shards::Blanks blanks(directory.folder, 2 << 20, 4096);
  std::vector<shards::Moved> moved;
  for (const shards::Record& record : directory.records)
    if (blanks.add(directory.name(record), record.size, record.crc))
      moved.push_back({&record, blanks.offsets.back(), record.size, record.crc});
  size_t written = 0;
  for (const auto& [start, end] : blanks.spans) written += end - start;
  if (written != blanks.data.size()) std::abort();
  std::string made;
  if (!shards::redirected(directory, moved, made)) std::abort();
  shards::Directory again(made);
  if (!again.read(count, std::max<uint64_t>(blanks.end, 1 << 20))) std::abort();
}

void archive(Bytes data) {
  for (uint64_t count = 1; count < 8; ++count) {
    shards::Directory directory(data);
    if (!directory.read(count, 1 << 20)) continue;
    for (const shards::Record& record : directory.records) {
      if (directory.find(directory.name(record)) != &record) std::abort();
      const size_t start = directory.payload(record, data);
      if (start + (start ? record.size : 0) > data.size()) std::abort();
    }
    directory.find("data/none");
    tail(directory, count);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // An array of just the size, on the heap, where a sanitizer sees every step aside.
  const auto copy = std::make_unique<uint8_t[]>(size);
  if (size != 0) std::memcpy(copy.get(), data, size);
  pickle(copy.get(), size);
  metadata(copy.get(), size);
  archive(Bytes(reinterpret_cast<const char*>(copy.get()), size));
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
    for (size_t edits = roll(4); edits && !data.empty(); --edits) {
      const size_t at = roll(data.size());
      switch (roll(4)) {
        case 0: data[at] = static_cast<char>(data[at] ^ (1 << roll(8))); break;
        case 1: data[at] = "(tRQhqrju}.)0\x85\x94K"[roll(16)]; break;
        case 2: data.erase(at, roll(12)); break;
        default: data.insert(at, data.substr(roll(data.size()), roll(12))); break;
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(data.data()), data.size());
  }
  std::printf("%ld mutations\n", wanted);
  return 0;
}

#endif
