"""What a run keeps in the host's memory, and whether there is room for it.

The kernel kills what takes more than there is, by a signal that no process can answer: better to say so before.
"""

from __future__ import annotations

from dataclasses import replace

from ligertune.planning.plan import Plan, row_length

GIB = 2**30


def host_parts(plan: Plan) -> dict[str, tuple[int, int]]:
    """Key and value of the recipe -> (bytes for each process, bytes for one of them alone), where anything is kept.

    Paged optimizers are left out: their states leave the device only as far as they have to.
    """
    states, micro = plan.bytes, plan.batching.micro_batch_size
    waits = plan.budget.host_bytes(micro, row_length(plan.rows, plan.data)) if plan.budget else 0
    found = {
        f"train.gradient_checkpointing: {plan.build.execution.gradient_checkpointing}": (waits, 0),
        "train.optim_offload: true": (states.in_host_memory * plan.optimizer.offload, 0),
        "parallel.cpu_offload: true": (states.total * plan.parallel.cpu_offload, 0),
    }
    if plan.checkpoint.async_save and plan.checkpoint.save_strategy != "no":
        found["checkpoint.async_save: true"] = (0, states.trained + states.saved_states)
    return {key: taken for key, taken in found.items() if any(taken)}


def warn_of_host_memory(plan: Plan, *, processes: int, free: int | None) -> Plan:
    """The plan, with a note where what `processes` of this host would keep in its memory is more than the free bytes.

    A note and no refusal: a virtual machine may be given more memory when it takes more.
    """
    if plan.machine.device == "cpu" or free is None:
        return plan
    parts = host_parts(plan)
    needed = sum(processes * each + once for each, once in parts.values())
    if needed <= free:
        return plan
    named = [
        f"{key}, {(each or once) / GIB:.1f} GiB{' for each process' if each and processes > 1 else ''}"
        for key, (each, once) in parts.items()
    ]
    note = (
        f"this host has {free / GIB:.1f} GiB of memory free, and this run is going to keep {needed / GIB:.1f} GiB "
        f"there ({'; '.join(named)}): if there is no more to be had, the kernel will kill it"
    )
    return replace(plan, notes=(*plan.notes, note))
