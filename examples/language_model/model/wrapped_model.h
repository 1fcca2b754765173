// A language model whose parameters ranks share.
#pragma once

#include <memory>

#include <zeropage/distributed_data_parallel.h>

#include "language_model/model/language_model.h"

namespace language_model {

using WrappedModel = zeropage::DistributedDataParallel<std::shared_ptr<LanguageModel>>;

}  // namespace language_model
