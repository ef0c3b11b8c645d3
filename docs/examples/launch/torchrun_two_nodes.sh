#!/bin/bash
# Train a recipe on two nodes with torchrun. Run this script on both nodes, within a few minutes of each other:
#
#   first node:   NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash torchrun_two_nodes.sh recipe.yaml
#   second node:  NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash torchrun_two_nodes.sh recipe.yaml
#
# MASTER_ADDR is a name or address of the first node that the second node reaches. MASTER_PORT must be free there.
# Both nodes need the same version of ligertune, and the same number of GPUs of the same type.
# checkpoint.output_dir, the recipe and the data must be on a file system that both nodes share, under the same path.
# Leave parallel.num_processes at auto in the recipe: torchrun sets the number of processes.

set -euo pipefail

recipe=${1:?usage: NODE_RANK=0|1 MASTER_ADDR=HOST bash torchrun_two_nodes.sh RECIPE [OPTIONS OF ligertune train]}
shift
: "${NODE_RANK:?set NODE_RANK to 0 on the first node and to 1 on the second}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"

# The network interface that connects the nodes, if NCCL does not select it:
# export NCCL_SOCKET_IFNAME=eth0

# torchrun sets OMP_NUM_THREADS to 1 if it is not set. parallel.cpu_offload and train.optim_offload need more threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

# -m runs the package, as `python -m ligertune` does. `--nproc-per-node gpu` starts one process per visible GPU.
# --resume auto starts a run if output_dir holds none, and otherwise continues from the newest complete checkpoint.
# On SIGTERM or Ctrl-C torchrun gives its processes 30 seconds to end. A checkpoint that takes longer is not saved; the
# one before it stays complete. Choose checkpoint.save_steps accordingly.
exec torchrun \
  --nnodes 2 \
  --nproc-per-node "${GPUS_PER_NODE:-gpu}" \
  --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" \
  --master-port "${MASTER_PORT:-29500}" \
  -m ligertune train "$recipe" --resume auto "$@"
