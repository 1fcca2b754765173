#include "zero/gradients/gradient_presence.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace zeropage::zero {

GradientPresence::GradientPresence(size_t parameters, size_t pages)
    : parameters_(parameters),
      of_all_(at::zeros({static_cast<int64_t>(parameters + kToldBytes)}, at::kByte)),
      of_page_(pages) {}

void GradientPresence::make_room_beside(size_t count) {
  of_all_ = at::zeros({static_cast<int64_t>(parameters_ + kToldBytes + count)}, at::kByte);
}

comm::Pending GradientPresence::start_agreeing(const AgreementHashes& own_hashes,
                                               comm::Communicator& communicator) {
  put(own_hashes, of_all_.mutable_data_ptr<uint8_t>() + parameters_);
  return communicator.all_reduce(of_all_, comm::ReduceOp::kMax, "which parameters have a gradient");
}

AgreementResult GradientPresence::agreed_on() const {
  return agreement_result(of_all_.const_data_ptr<uint8_t>() + parameters_);
}

void GradientPresence::start_agreeing(size_t page, const std::vector<size_t>& parameters,
                                      const AgreementHashes& own_hashes,
                                      comm::Communicator& communicator) {
  OfPage& of_page = of_page_[page];
  of_page.parameters = parameters;
  of_page.has = at::empty({static_cast<int64_t>(parameters.size() + kToldBytes)}, at::kByte);
  uint8_t* const bytes = of_page.has.mutable_data_ptr<uint8_t>();
  uint8_t* const behind =
      std::transform(parameters.begin(), parameters.end(), bytes,
                     [this](size_t parameter) { return static_cast<uint8_t>(has(parameter)); });
  put(own_hashes, behind);
  of_page.agreement = communicator.all_reduce(of_page.has, comm::ReduceOp::kMax,
                                              "which parameters of a page have a gradient");
}

GradientPresence::OfAnyRank GradientPresence::wait(size_t page) {
  OfPage& of_page = of_page_[page];
  of_page.agreement.wait();
  const auto has_gradient = [&of_page](size_t parameter) {
    const auto at =
        std::lower_bound(of_page.parameters.begin(), of_page.parameters.end(), parameter);
    TORCH_INTERNAL_ASSERT(at != of_page.parameters.end() && *at == parameter);
    return of_page.has.const_data_ptr<uint8_t>()[at - of_page.parameters.begin()] != 0;
  };
  return {has_gradient,
          agreement_result(of_page.has.const_data_ptr<uint8_t>() + of_page.parameters.size())};
}

}  // namespace zeropage::zero
