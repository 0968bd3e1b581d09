#!/usr/bin/env bash
# From raw text to a score on two machines with 8 GPUs each (GPUS=4 for 4), on both at about the same time:
#
#     NODE=0 scripts/train_2_nodes.sh node1 base.yaml --name base   # on node1
#     NODE=1 scripts/train_2_nodes.sh node1 base.yaml --name base   # on the other
#
# First the machine where they meet, then the recipe; what follows goes to every command. The project's folder (data/ and
# runs/ in it) must be on a file system that both see. If a process dies, all start again from the newest checkpoint. More
# machines: NODES=4, and NODE=0 on one of them only. Without GPUs it is tried as two agents on one machine
# (tests/test_processes.py).
set -euo pipefail
meeting=${1:?"give the machine where they meet, e.g. node1"}
recipe=${2:?"give a recipe, e.g. base.yaml"}
shift 2

# The others wait for this one where they meet, for as long as it makes the data.
if [ "${NODE:?"set NODE to 0 on the first machine, to 1 on the second"}" = 0 ]; then
    nmt run -c "$recipe" "$@" --upto encode
fi
# A store of its own for each start: the addresses of processes that died do not stand in the way.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" --rdzv-backend c10d --rdzv-id nmt \
    --rdzv-endpoint "$meeting:${PORT:-29500}" --max-restarts 3 -m nmt train -c "$recipe" "$@"
if [ "$NODE" = 0 ]; then
    nmt run -c "$recipe" "$@"
fi
