// Which parameters have a gradient: on this rank, and once the ranks have agreed, on any. What ranks compare
// (zero/agreement/rank_agreement.h) goes along.
//
// Threads: the thread that runs backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/agreement/agreement_hashes.h"
#include "zeropage/communicator.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

using HasGradient = std::function<bool(size_t parameter)>;

class GradientPresence {
 public:
  GradientPresence(size_t parameters, size_t pages);

  void note(size_t parameter, bool has) { of_all_.mutable_data_ptr<uint8_t>()[parameter] = has; }
  bool has(size_t parameter) const { return of_all_.const_data_ptr<uint8_t>()[parameter] != 0; }

  // Bytes of somebody else's that go along: before it ends this rank's, then the largest of all.
  void make_room_beside(size_t count);
  const uint8_t* beside() const {
    return of_all_.const_data_ptr<uint8_t>() + parameters_ + kToldBytes;
  }
  uint8_t* beside() { return of_all_.mutable_data_ptr<uint8_t>() + parameters_ + kToldBytes; }

  // has() is about any rank once this has ended, and agreed_on() of all. Collective.
  comm::Pending start_agreeing(const AgreementHashes& own_hashes, comm::Communicator& communicator);
  AgreementResult agreed_on() const;

  // The same of these parameters, ascending, all of the page's that train: ahead of the others, for a step
  // that does not wait for all pages. Collective.
  void start_agreeing(size_t page, const std::vector<size_t>& parameters,
                      const AgreementHashes& own_hashes, comm::Communicator& communicator);
  struct OfAnyRank {
    HasGradient has_gradient;
    AgreementResult agreed_on;
  };
  // Blocks until that has ended. Valid until the page's next.
  OfAnyRank wait(size_t page);

 private:
  struct OfPage {
    std::vector<size_t> parameters;
    at::Tensor has;  // [parameters + kToldBytes], uint8
    comm::Pending agreement;
  };

  const size_t parameters_;
  at::Tensor of_all_;  // [parameters + kToldBytes + those beside], uint8
  std::vector<OfPage> of_page_;
};

}  // namespace zeropage::zero
