# Headers that programs of release 0.1 may include, and where they are now. The old names are installed for one release: each includes the
# new one and says so.
set(ZEROPAGE_MOVED_HEADERS
    "checkpointing/offload_options.h checkpointing/activation_offload_options.h"
    "comm/launcher.h comm/launcher/launcher.h"
    "memory/device.h device/device.h"
    "memory/device_places.h device/device_places.h"
    "memory/host_mapping.h device/host_mapping.h"
    "memory/host_memory.h device/host_memory.h"
    "memory/named_range.h device/named_range.h"
    "memory/page_nodes.h device/page_nodes.h"
    "memory/pending.h device/pending.h"
    "memory/pinned_arena.h device/pinned_arena.h"
    "memory/stream.h device/stream.h"
    "memory/tensor_structure.h operators/tensor_structure.h"
    "memory/topology.h device/topology.h"
    "zero/data_parallel.h zero/distributed_data_parallel.h"
    "zero/nvme_activations.h zero/tiers/nvme_activations.h"
    "zero/sharded_state.h zero/saving/sharded_state.h"
    "zero/state_saver.h zero/saving/state_saver.h"
    "zero/update/sharded_optimizer.h zero/sharded_optimizer.h")
# Those that were installed then and are private now. Programs that include one are told so.
set(ZEROPAGE_PRIVATE_HEADERS
    comm/communicator_choice.h
    comm/device_communicator.h
    comm/gloo_communicator.h
    comm/nccl_communicator.h
    comm/shared_memory_communicator.h
    comm/staged_communicator.h
    comm/two_level_communicator.h
    memory/construction_tape.h
    memory/dispatch_keys.h
    memory/mapping_pool.h
    memory/meta_operators.h
    memory/operator_interceptor.h
    memory/operator_schema.h
    memory/page.h
    memory/pager.h
    memory/pins.h
    memory/trace.h
    memory/trap.h
    offload/cpu/flat_norm.h
    offload/cpu/fused_step.h
    offload/cpu/instructions.h
    offload/cpu/packed_step.h
    offload/cpu/quantised_block.h
    offload/cpu/quantised_step.h
    offload/cpu/quantised_vectors.h
    offload/cpu/stochastic_rounding.h
    offload/cuda/flat_norm.h
    offload/cuda/fused_step.h
    offload/cuda/packed_step.h
    offload/cuda/stochastic_rounding.h
    offload/flat_stretch.h
    offload/flat_tensor.h
    offload/packed_stretch.h
    offload/packed_tensors.h
    offload/parallel.h
    offload/split_value.h
    offload/split_values.h
    offload/summation_tree.h
    zero/buffer_sync.h
    zero/class_update.h
    zero/deferred_values.h
    zero/fused_update.h
    zero/gradient_buckets.h
    zero/gradient_reducer.h
    zero/memory_need.h
    zero/module_parameters.h
    zero/nvme_home.h
    zero/offloaded_steps.h
    zero/offloading.h
    zero/owned_gradient.h
    zero/page_home.h
    zero/page_update.h
    zero/parameter_checks.h
    zero/parameter_pages.h
    zero/shard_layout.h
    zero/shard_source.h
    zero/sharded_gradients.h
    zero/sharded_parameters.h
    zero/stochastic_update.h
    zero/whole_gradients.h)

# Written into the build, where programs that are built with us find them too.
foreach(moved IN LISTS ZEROPAGE_MOVED_HEADERS)
  separate_arguments(moved)
  list(GET moved 0 before)
  list(GET moved 1 now)
  list(APPEND old_names ${before})
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/moved/${before} @ONLY CONTENT
"// Only for programs written for release 0.1.
#pragma once

#pragma message(\"Zeropage: <@before@> is <@now@> now; include that. The old name goes with the next release.\")
#include \"@now@\"
")
endforeach()
foreach(private IN LISTS ZEROPAGE_PRIVATE_HEADERS)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/moved/${private} @ONLY CONTENT
"#error \"Zeropage: <@private@> is private now; include <zero/zeropage.h>, or a header of cmake/public_headers.cmake\"
")
endforeach()

# What an earlier configuration wrote would hide a header of that name.
file(GLOB_RECURSE written RELATIVE ${PROJECT_BINARY_DIR}/moved ${PROJECT_BINARY_DIR}/moved/*.h)
list(REMOVE_ITEM written ${old_names} ${ZEROPAGE_PRIVATE_HEADERS})
foreach(stale IN LISTS written)
  file(REMOVE ${PROJECT_BINARY_DIR}/moved/${stale})
endforeach()
