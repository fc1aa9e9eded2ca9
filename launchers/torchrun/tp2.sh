#!/usr/bin/env bash
# One machine, two tensor-parallel ranks.
#   launchers/torchrun/tp2.sh --config configs/quickstart.yaml [key=value ...]
exec torchrun --standalone --nproc-per-node=2 -m dynamo_megatron.train "$@" parallel.tensor=2
