#!/usr/bin/env bash
# Starts ranks on several hosts by Open MPI, from one of them (examples/cluster/README.md).
#
#   examples/cluster/mpirun.sh HOST:RANKS[,HOST:RANKS ...] [PROGRAM [FLAG ...]]
#
# MPIRUN_FLAGS: more flags of mpirun's. MASTER_ADDR: where ranks meet, if not at the first host.
set -euo pipefail

[ $# -ge 1 ] || { echo "mpirun.sh: expected HOST:RANKS[,...] [PROGRAM [FLAG ...]], got no argument" >&2; exit 2; }
hosts=$1
shift
[ $# -gt 0 ] || set -- build/release/examples/train_resnet --save run --save-every 100 --auto-resume
first_host=${hosts%%[:,]*}

# shellcheck disable=SC2086  # flags are words
exec mpirun --host "$hosts" --bind-to none -x "MASTER_ADDR=${MASTER_ADDR:-$first_host}" ${MPIRUN_FLAGS:-} "$@"
