"""Slurm: translate the variables of `srun` tasks to those of torchrun.

accelerate 1.15 reads those of MPI launchers, and not Slurm's: under `srun` each task would be a run of one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ligertune.errors import UserError


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch and accelerate read, for one of several srun tasks; {} for other processes.

    Only srun sets SLURM_STEP_NUM_TASKS; batch scripts have SLURM_PROCID and SLURM_NTASKS, too. Raises UserError if
    Slurm shows each task its own GPU only.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "SLURM_PROCID" not in environ or "WORLD_SIZE" in environ:
        return {}
    node = int(environ.get("SLURM_NODEID", "0"))
    on_node = tasks_of_nodes(environ["SLURM_STEP_TASKS_PER_NODE"])[node]
    visible = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("ROCR_VISIBLE_DEVICES") or ""
    if on_node > 1 and visible and visible.count(",") + 1 < on_node:
        raise UserError(
            f"Slurm shows this task the GPUs {visible}, and {on_node} tasks share the node: each task takes the GPU "
            "whose index is its local rank.",
            hint="Give srun --gpus-per-node instead of --gpus-per-task, or --gpu-bind=none.",
        )
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(on_node),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_node(environ["SLURM_STEP_NODELIST"]),
        # two jobs that share a node must not share a port
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20_000 + int(environ["SLURM_JOB_ID"]) % 20_000),
    }


def tasks_of_nodes(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node: "4(x2),3" -> [4, 4, 3]."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts


def first_node(nodes: str) -> str:
    """Return the first host name of a node list: "gpu[007-009,012],cpu3" -> "gpu007"."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise UserError(
            f"The environment variable SLURM_STEP_NODELIST is {nodes!r}, which names no node.",
            hint="Set MASTER_ADDR to the name of the first node.",
        )
    return "".join(part or "" for part in found.groups())
