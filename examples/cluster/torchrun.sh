#!/usr/bin/env bash
# Starts this host's ranks by torchrun. Call it on each host with the same arguments (examples/cluster/README.md).
#
#   examples/cluster/torchrun.sh HOSTS RANKS FIRST_HOST [PROGRAM [FLAG ...]]
#
# HOSTS: how many there are. RANKS: of each host. FIRST_HOST: the host, as the others call it, where they meet.
# TORCHRUN=FILE: another torchrun than the one on PATH. PORT=N: where the hosts meet; 29400.
set -euo pipefail

[ $# -ge 3 ] || { echo "torchrun.sh: expected HOSTS RANKS FIRST_HOST [PROGRAM [FLAG ...]], got $# arguments" >&2; exit 2; }
hosts=$1 ranks=$2 first_host=$3
shift 3
[ $# -gt 0 ] || set -- build/release/examples/train_resnet --save run --save-every 100 --auto-resume

exec "${TORCHRUN:-torchrun}" --no-python --nnodes "$hosts" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-endpoint "$first_host:${PORT:-29400}" --rdzv-id "${RUN_ID:-train}" "$@"
