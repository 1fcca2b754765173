#include "comm/devices/nccl_communicator.h"
#include "zeropage/check.h"

namespace zeropage::comm {

bool has_nccl() {
  return false;
}

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> /*host*/,
                                                     const NcclOptions& /*options*/) {
  ZP_THROW("this build of Zeropage has no NCCL; build the preset cuda (cmake --preset cuda)");
}

}  // namespace zeropage::comm
