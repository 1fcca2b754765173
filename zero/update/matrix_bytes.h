// What the exchange of matrices takes (zero/update/matrix_exchange.h), without running it.
//
// Pure: follows from the layout and the owners.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <c10/core/ScalarType.h>

#include "zero/pages/parameter_pages.h"
#include "zero/update/matrix_owners.h"

namespace zeropage::zero {

// On this rank.
struct MatrixBytes {
  int64_t whole = 0;        // of its own matrices, but those that it has as a whole anyway
  int64_t to_owners = 0;    // messages, sent and received
  int64_t from_owners = 0;  // the same on the way back
};

struct MatrixPlace {
  c10::ScalarType wire_dtype = c10::kFloat;
  bool is_on_device = true;  // that of the ranks, where its page is updated
};

MatrixBytes matrix_bytes(const ParameterPages& pages, const std::vector<OwnedMatrix>& matrices,
                         const std::function<MatrixPlace(size_t parameter)>& place_of);

}  // namespace zeropage::zero
