# Headers that programs of release 0.1 may include, and where they are now. The old names are installed for one release: each includes the
# new one and says so.
set(ZEROPAGE_MOVED_HEADERS
    "comm/launcher/launcher.h comm/launcher/launcher.h"
    "device/host_memory.h device/host_memory.h"
    "device/pending.h device/pending.h"
    "device/stream.h device/stream.h"
    "device/topology.h device/topology.h"
    "operators/construction_tape.h operators/construction_tape.h"
    "operators/operator_interceptor.h operators/operator_interceptor.h"
    "operators/tensor_structure.h operators/tensor_structure.h"
    "paging/page.h paging/page.h"
    "paging/pager.h paging/pager.h"
    "paging/pins.h paging/pins.h"
    "paging/trace.h paging/trace.h"
    "zero/gradients/gradient_reducer.h zero/gradients/gradient_reducer.h"
    "zero/tiers/nvme_activations.h zero/tiers/nvme_activations.h"
    "zero/pages/parameter_pages.h zero/pages/parameter_pages.h"
    "zero/layout/shard_layout.h zero/layout/shard_layout.h"
    "zero/update/sharded_optimizer.h zero/update/sharded_optimizer.h"
    "zero/setup/sharded_parameters.h zero/setup/sharded_parameters.h"
    "zero/saving/sharded_state.h zero/saving/sharded_state.h"
    "zero/saving/state_saver.h zero/saving/state_saver.h")

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
