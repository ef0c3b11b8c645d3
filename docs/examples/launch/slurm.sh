#!/bin/bash
# Train a recipe on 2 nodes of 8 GPUs with Slurm, one task per GPU:
#
#   sbatch slurm.sh recipe.yaml
#
# ligertune reads the variables that srun sets (ligertune/launcher/processes.py): no torchrun and no host file is needed.
# checkpoint.output_dir, the recipe and the data must be on a file system that all nodes share.
# On one node, one task is enough, because `ligertune train` starts one process per visible GPU:
#
#   srun --nodes=1 --ntasks=1 --gpus-per-node=8 --cpus-per-task=64 ligertune train recipe.yaml

#SBATCH --job-name=ligertune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
# Each task must see all GPUs of its node: with --gpus-per-task, Slurm shows each task one GPU, and ligertune stops.
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.log
# A job that is requeued continues the same log file.
#SBATCH --open-mode=append
#SBATCH --requeue
# Slurm sends SIGUSR1 to the tasks 300 s before the time limit. They finish their step, save a checkpoint and exit with
# code 130. Choose more seconds than one step and one checkpoint take.
#SBATCH --signal=USR1@300

set -uo pipefail

recipe=${1:?usage: sbatch slurm.sh RECIPE}

# Activate the environment that has ligertune here, for example:
# source "$HOME/ligertune/.venv/bin/activate"

# Files that all nodes may share. The first rank of each node prepares the data; later runs read it from this cache.
export HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
export LIGERTUNE_CACHE=${LIGERTUNE_CACHE:-$HOME/.cache/ligertune}
# The compiled kernels. A folder on the node's own disk avoids many small files on the network.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-$USER}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# If NCCL selects the wrong network interface, name the right one:
# export NCCL_SOCKET_IFNAME=ib0

# --resume auto starts a run if output_dir holds none, and otherwise continues from the newest complete checkpoint.
# --wait ends the other tasks 120 s after the first task ended, so that a dead rank does not block the job.
# --kill-on-bad-exit would end them at once: an interrupted run exits with 130, and tasks that still close down would
# be killed, which changes the exit code.
# srun does not take --cpus-per-task from sbatch (Slurm 22.05 and newer), so it is given again.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --wait=120 --kill-on-bad-exit=0 \
  ligertune train "$recipe" --resume auto
code=$?

# 130: interrupted, and a checkpoint is saved. The job returns to the queue and continues later.
if [ "$code" -eq 130 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
