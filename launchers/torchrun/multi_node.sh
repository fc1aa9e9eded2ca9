#!/usr/bin/env bash
# Several machines. Run it on each of them, with the number of machines, this one's place (from 0),
# the address of the first machine, and the processes a machine starts:
#   launchers/torchrun/multi_node.sh NODES NODE_RANK HEAD_ADDRESS PROCESSES --config FILE [key=value ...]
exec torchrun --nnodes="$1" --node-rank="$2" --master-addr="$3" --master-port="${MASTER_PORT:-29500}" --nproc-per-node="$4" -m dynamo_megatron.train "${@:5}"
