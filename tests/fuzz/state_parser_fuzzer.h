// What the fuzzer calls with any bytes, and state_test with mutations of the corpus.
#pragma once

#include <cstddef>
#include <cstdint>

// Reads the bytes as a header of safetensors, as a manifest, and as a manifest whose checksum is made
// right. Aborts, with words on stderr, where a parser takes more memory than its header says before it
// believes anything, or accepts what it should not. Returns 0.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);
