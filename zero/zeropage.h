// The public API in one include. Installed, it is <zero/zeropage.h>.
#pragma once

#include "accumulate/batch_arithmetic.h"
#include "accumulate/micro_batches.h"
#include "checkpointing/checkpoint.h"
#include "checkpointing/checkpointed.h"
#include "checkpointing/recompute_statistics.h"
#include "checkpointing/saved_tensors.h"
#include "comm/world.h"
#include "memory/ledger.h"
#include "memory/memory_table.h"
#include "zero/accumulator.h"
#include "zero/data_parallel.h"
#include "zero/gathered_parameters.h"
#include "zero/gradient_norm.h"
#include "zero/joined_batches.h"
#include "zero/optimizer.h"
#include "zero/options.h"
