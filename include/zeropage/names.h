// The names that a training script writes, in zeropage:: whatever folder they are from. They are the same things under their folders'
// names (zeropage::comm::World, zeropage::memory::Ledger).
#pragma once

#include "zeropage/accumulator.h"
#include "zeropage/activation_offload.h"
#include "zeropage/batches.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/checkpoint.h"
#include "zeropage/ledger.h"
#include "zeropage/mesh.h"
#include "zeropage/recompute.h"
#include "zeropage/saved_tensors.h"
#include "zeropage/world.h"

namespace zeropage {

// Ranks.
using comm::launched_by_environment;
using comm::LaunchOptions;
using comm::Mesh;
using comm::MeshAxis;
using comm::RanksFailed;
using comm::ReductionOrder;
using comm::ThreadsOptions;
using comm::Transport;
using comm::World;
using comm::WorldOptions;

// Micro-batches and the scale of the loss.
using accumulate::LossScalerOptions;
using accumulate::micro_batches;
using accumulate::NormSpikeOptions;

// Activations.
using checkpointing::ActivationOffload;
using checkpointing::ActivationOffloadOptions;
using checkpointing::ActivationOffloadStatistics;
using checkpointing::ActivationScope;
using checkpointing::checkpoint;
using checkpointing::checkpoint_each;
using checkpointing::checkpoint_sequential;
using checkpointing::Checkpointed;
using checkpointing::CheckpointOptions;
using checkpointing::EveryBlocks;
using checkpointing::PartitionedCheckpoints;
using checkpointing::Recompute;
using checkpointing::RecomputeOptions;
using checkpointing::SavedTensorScope;

// Bytes.
using memory::format_bytes;
using memory::Kind;
using memory::KindScope;
using memory::Ledger;
using memory::LedgerScope;
using memory::memory_table;
using memory::MemoryColumn;
using memory::parse_bytes;
using memory::Tier;
using memory::TierBytes;
using memory::operator""_GiB;
using memory::operator""_KiB;
using memory::operator""_MiB;

// The message of an exception without LibTorch's stack: for a `catch` in main().
using memory::message_of;

}  // namespace zeropage
