# The headers that users include. What these include comes with them; nothing else is installed.
set(ZEROPAGE_PUBLIC_HEADERS
    zero/zeropage.h
    # what a training script names
    zero/accumulator.h
    zero/distributed_data_parallel.h
    zero/deferred_module.h
    zero/gathered_parameters.h
    zero/gradient_norm.h
    zero/joined_batches.h
    zero/names.h
    zero/step_report.h
    zero/module_selection.h
    zero/offload_options.h
    zero/optimizer.h
    zero/optimizer_traits.h
    zero/options.h
    zero/saving/sharded_state.h
    zero/saving/state_saver.h
    zero/tiers/nvme_activations.h
    accumulate/batch_arithmetic.h
    accumulate/loss_scaler.h
    accumulate/micro_batches.h
    accumulate/norm_spikes.h
    checkpointing/activation_offload.h
    checkpointing/checkpoint.h
    checkpointing/checkpointed.h
    checkpointing/partitioned_checkpoints.h
    checkpointing/recompute.h
    checkpointing/recompute_plan.h
    checkpointing/recompute_statistics.h
    checkpointing/saved_tensors.h
    offload/lion.h
    # ranks, without a module
    comm/communicator.h
    comm/launcher/launcher.h
    comm/rendezvous.h
    comm/simulated_communicator.h
    comm/topology.h
    comm/traffic.h
    comm/transport.h
    comm/world.h
    # bytes, in programs and in their tests
    memory/bytes.h
    memory/check.h
    memory/device_memory.h
    memory/ledger.h
    memory/memory_table.h
    memory/process_memory.h
    memory/testing.h
    device/host_memory.h
    device/topology.h
    # state on disk, without a model
    state/safetensors.h
    state/saved_state.h
    state/state_error.h
    # an optimizer's step over flat tensors, records on NVMe
    offload/exact_sum.h
    offload/flat_norm.h
    offload/fused_step.h
    offload/nvme_file.h
    offload/nvme_heap.h)
