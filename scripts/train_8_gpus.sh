#!/usr/bin/env bash
# From raw text to a score on one machine with 8 GPUs (GPUS=4 for 4):
#
#     scripts/train_8_gpus.sh base.yaml --set train.seed=2 --name base.2
#
# The recipe comes first; what follows goes to every command. `nmt run -c base.yaml --processes 8` does the same; this
# shows the steps, for those who start torchrun in their own way. The recipe's update is the same on any number of GPUs.
set -euo pipefail
recipe=${1:?"give a recipe, e.g. base.yaml"}
shift

# Several processes can't make the data, so one does it before.
nmt run -c "$recipe" "$@" --upto encode
torchrun --standalone --nproc-per-node "${GPUS:-8}" -m nmt train -c "$recipe" "$@"
# The training is fresh now; what is left is to translate and to score.
nmt run -c "$recipe" "$@"
