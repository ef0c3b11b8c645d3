"""Host memory that a run keeps for offloading and asynchronous saves, and a note if the host has too little.

Linux kills a process that takes more memory than there is, with a signal that it cannot answer. So the plan says it.
"""

from __future__ import annotations

from dataclasses import replace

from ligertune.planning.plan import Plan

GIB = 2**30


def host_memory_parts(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return recipe key and value -> (bytes per process, bytes once per host), without empty parts.

    Paged optimizers are not counted: their states move to the host only when the device is full.
    """
    states = plan.bytes
    activations = plan.memory.host_bytes(plan.batching.micro_batch_size, plan.row_length) if plan.memory else 0
    parts = {
        f"train.gradient_checkpointing: {plan.build.execution.gradient_checkpointing}": (activations, 0),
        "train.optim_offload: true": (states.in_host_memory * plan.optimizer.offload, 0),
        "parallel.cpu_offload: true": (states.total * plan.parallel.cpu_offload, 0),
    }
    if plan.checkpoint.async_save and plan.checkpoint.save_strategy != "no":
        parts["checkpoint.async_save: true"] = (0, states.trained + states.saved_states)
    return {key: sizes for key, sizes in parts.items() if any(sizes)}


def warn_of_host_memory(plan: Plan, *, processes: int, free: int | None) -> Plan:
    """Return the plan, with a note if its `processes` on this host would keep more than `free` bytes in host memory.

    A note and not an error, because a virtual machine may receive more memory when it takes more.
    """
    if plan.machine.device == "cpu" or free is None:
        return plan
    parts = host_memory_parts(plan)
    needed = sum(processes * per_process + once for per_process, once in parts.values())
    if needed <= free:
        return plan
    named = [
        f"{key}, {(per_process or once) / GIB:.1f} GiB{' per process' if per_process and processes > 1 else ''}"
        for key, (per_process, once) in parts.items()
    ]
    note = (
        f"this host has {free / GIB:.1f} GiB of free memory, and this run will keep {needed / GIB:.1f} GiB there "
        f"({'; '.join(named)}): Linux kills the run if the host cannot provide it"
    )
    return replace(plan, notes=(*plan.notes, note))
