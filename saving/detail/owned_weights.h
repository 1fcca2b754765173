// Values of whole parameters into what this rank owns of them.
//
// Threads: the training thread. Nothing here is collective: whole pages are to be gathered afterwards.
#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/TensorBody.h>

#include "zero/pages/master_weights.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::saving {

// Fills a flat tensor with a parameter's elements from `first` on, in row-major order of the whole parameter.
using ReadElements = std::function<void(int64_t first, const at::Tensor& to)>;

// Fills `to`, flat and of any dtype and device, by reads into tensors of `dtype` on the host: directly, or in pieces of
// up to 2^18 elements that are converted.
void read_as(at::ScalarType dtype, int64_t first, const at::Tensor& to, const ReadElements& read);

// A parameter's values as they are stored.
struct StoredValues {
  at::ScalarType dtype;  // of `rounded`
  // Both take tensors of any dtype and device. rounded: what operators are to see, if it is in their dtype. exact: those
  // of most digits.
  ReadElements rounded;
  ReadElements exact;
};

// owned: of the parameter's page.
void fill_owned(const zero::ParameterPages& pages, const zero::PlacedParameter& placed,
                const zero::MasterWeights::Owned& owned, const StoredValues& stored);

}  // namespace zeropage::saving
