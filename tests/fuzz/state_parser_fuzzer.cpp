#include "tests/fuzz/state_parser_fuzzer.h"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "tests/fuzz/counted_allocations.h"
#include "tests/harness/byte_text.h"
#include "tests/harness/sealed_manifest.h"
#include "zeropage/saved_state.h"

namespace {

using namespace zeropage::state;
using namespace zeropage::testing;

constexpr int64_t kAllowedBytes = 64 << 10;

[[noreturn]] void fail(const char* words) {
  std::fprintf(stderr, "state_parser_fuzzer: %s\n", words);
  std::abort();
}

void expect(bool holds, const char* words) {
  if (!holds) fail(words);
}

// Whether the parser accepts it. What it refuses it has not taken more than the allowed memory for.
template <typename Parse>
bool accepts(const ByteText& file, Parse parse) {
  const int64_t before = live_allocated_bytes();
  reset_most_allocated_bytes();
  try {
    parse(file);
    return true;
  } catch (const StateError&) {
    const auto allowed = static_cast<int64_t>(file.size()) + kAllowedBytes;
    expect(most_allocated_bytes() - before <= allowed,
           "more memory than the file's size and 64 KiB");
    return false;
  }
}

void check_header(const SafetensorsHeader& header, uint64_t file_bytes) {
  std::set<std::string> names;
  uint64_t end = 0;
  for (const TensorEntry& tensor : header.tensors) {
    expect(tensor.begin == end && tensor.end >= tensor.begin, "tensors that are not in order");
    expect(bytes_of(tensor) == tensor.end - tensor.begin, "a size that is not the shape's");
    expect(names.insert(tensor.name).second, "a name twice");
    end = tensor.end;
  }
  expect(header.data_begin + end == file_bytes, "tensors that are not the file's bytes");
  if (names.contains("")) return;  // read, but never written
  const std::string prefix = safetensors_prefix(header.tensors, header.metadata);
  // In memory the data are nothing but their size.
  if (end > uint64_t{1} << 20) return;
  const SafetensorsHeader again = read_safetensors_header(ByteText(prefix + std::string(end, 'x')));
  expect(again.tensors == header.tensors && again.metadata == header.metadata,
         "a header that comes back as another one");
}

void check_manifest(const Manifest& manifest) {
  for (const FileEntry& entry : manifest.files) {
    expect(entry.name == kWeightsFile || entry.name == kOptimizerFile, "a file of another name");
  }
  const Manifest again = read_manifest(ByteText(to_text(manifest)));
  expect(again.step == manifest.step && again.files == manifest.files &&
             again.content == manifest.content,
         "a manifest that comes back as another one");
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string input(reinterpret_cast<const char*>(data), bytes);
  {
    const ByteText file(input);
    SafetensorsHeader header;
    if (accepts(file, [&](const ByteText& source) { header = read_safetensors_header(source); })) {
      check_header(header, input.size());
    }
    accepts(file, [](const ByteText& source) { check_manifest(read_manifest(source)); });
  }
  // Behind a right checksum memory is the content's.
  try {
    check_manifest(read_manifest(ByteText(sealed(input))));
  } catch (const StateError&) {
  }
  return 0;
}
