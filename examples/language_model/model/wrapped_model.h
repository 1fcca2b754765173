// A language model whose parameters ranks share.
#pragma once

#include <memory>

#include <zeropage/distributed_data_parallel.h>

#include "language_model/data/rows.h"
#include "language_model/model/language_model.h"

namespace language_model {

using WrappedModel = zeropage::DistributedDataParallel<std::shared_ptr<LanguageModel>>;

// Who reads other rows: ranks along the model's context axis, which are neighbours, read the same ones.
struct RowReaders {
  explicit RowReaders(const WrappedModel& model)
      : sharing(model->context() == nullptr ? 1 : model->context()->ranks.size()),
        count(model.world().size() / sharing),
        rank(model.world().rank() / sharing) {}

  const int64_t sharing;  // ranks that read the same rows
  const int64_t count;
  const int64_t rank;
};
// What of these rows the rank computes with, on its device: all, or its part of their tokens.
Rows own_part(const WrappedModel& model, const Rows& rows);

}  // namespace language_model
