#include "operators/construction_tape.h"
#include "zeropage/distributed_data_parallel.h"

namespace zeropage::detail {

std::shared_ptr<const operators::ConstructionTape> record_construction(
    const std::function<void()>& construct) {
  return std::make_shared<const operators::ConstructionTape>(construct);
}

}  // namespace zeropage::detail
