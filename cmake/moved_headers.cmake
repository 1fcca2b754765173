# Headers that programs of release 0.1 may include, and where they are now. The old names are installed for one release: each includes the
# new one and says so.
set(ZEROPAGE_MOVED_HEADERS
    "comm/launcher.h comm/launcher/launcher.h"
    "memory/host_memory.h device/host_memory.h"
    "memory/pending.h device/pending.h"
    "memory/stream.h device/stream.h"
    "memory/topology.h device/topology.h"
    "memory/construction_tape.h operators/construction_tape.h"
    "memory/operator_interceptor.h operators/operator_interceptor.h"
    "memory/tensor_structure.h operators/tensor_structure.h"
    "memory/page.h paging/page.h"
    "memory/pager.h paging/pager.h"
    "memory/pins.h paging/pins.h"
    "memory/trace.h paging/trace.h"
    "zero/data_parallel.h zero/distributed_data_parallel.h"
    "zero/gradient_reducer.h zero/gradients/gradient_reducer.h"
    "zero/nvme_activations.h zero/tiers/nvme_activations.h"
    "zero/parameter_pages.h zero/pages/parameter_pages.h"
    "zero/shard_layout.h zero/layout/shard_layout.h"
    "zero/sharded_optimizer.h zero/update/sharded_optimizer.h"
    "zero/sharded_parameters.h zero/setup/sharded_parameters.h"
    "zero/sharded_state.h zero/saving/sharded_state.h"
    "zero/state_saver.h zero/saving/state_saver.h")

# Written into the build, where programs that are built with us find them too.
foreach(moved IN LISTS ZEROPAGE_MOVED_HEADERS)
  separate_arguments(moved)
  list(GET moved 0 before)
  list(GET moved 1 now)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/moved/${before} @ONLY CONTENT
"// Only for programs written for release 0.1.
#pragma once

#pragma message(\"Zeropage: <@before@> is <@now@> now; include that. The old name goes with the next release.\")
#include \"@now@\"
")
endforeach()
