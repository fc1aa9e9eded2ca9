#!/usr/bin/env bash
# One machine, two data-parallel copies of two tensor-parallel ranks.
#   launchers/torchrun/tp2_dp2.sh --config configs/quickstart.yaml [key=value ...]
exec torchrun --standalone --nproc-per-node=4 -m dynamo_megatron.train "$@" parallel.tensor=2
