// What ranks compare in messages that travel anyway: a hash behind the elements of each, of what all are to compute alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/world.h"

namespace zeropage::parallel {

class Stamp {
 public:
  // name: says sizes, dtype and options of the call; for errors.
  explicit Stamp(const std::string& name);

  // How many elements of that dtype it takes.
  static int64_t numel(at::ScalarType dtype);
  // Writes it to the last elements of the last dimension.
  void put(const at::Tensor& message) const;
  // Takes it from the last elements of the last dimension of what came from a rank, to be compared by check().
  void note(const at::Tensor& message, int from_rank);
  // Throws where one that was noted is another, and names its rank. differs: "has other sizes; give ...", what that rank does otherwise, and
  // what to do. Waits for a device.
  void check(const comm::World& world, const char* differs) const;

 private:
  const std::string name_;
  const int64_t hash_;
  std::vector<at::Tensor> noted_;  // [1], int64
  std::vector<int> ranks_;
};

}  // namespace zeropage::parallel
