// Which parameters have a gradient: on this rank, and once the ranks have agreed, on any.
//
// Threads: the thread that runs backward.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "comm/communicator.h"
#include "device/pending.h"

namespace zeropage {

using HasGradient = std::function<bool(size_t parameter)>;

class GradientPresence {
 public:
  GradientPresence(size_t parameters, size_t pages);

  void note(size_t parameter, bool has) { of_all_.mutable_data_ptr<uint8_t>()[parameter] = has; }
  bool has(size_t parameter) const { return of_all_.const_data_ptr<uint8_t>()[parameter] != 0; }

  // has() is about any rank once this has ended. Collective.
  comm::Pending start_agreeing(comm::Communicator& communicator);

  // The same of these parameters, all of the page's that train: ahead of the others, for a step that
  // does not wait for all pages. Collective.
  void start_agreeing(size_t page, const std::vector<size_t>& parameters,
                      comm::Communicator& communicator);
  // Blocks until that has ended. Valid until the page's next.
  HasGradient wait(size_t page);

 private:
  struct OfPage {
    std::vector<size_t> parameters;
    at::Tensor has;  // [parameters], uint8
    comm::Pending agreement;
  };

  const at::Tensor of_all_;  // [parameters], uint8
  std::vector<OfPage> of_page_;
};

}  // namespace zeropage
