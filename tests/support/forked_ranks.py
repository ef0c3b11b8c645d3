"""Run a function on several ranks: forks of this process, which has imported everything already, joined by gloo.

Skips the test on a machine with a GPU: a process that uses CUDA cannot fork.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

LIMIT = 180  # seconds that a rank may take


def on_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what `function(rank)` returns on each rank. Raises AssertionError with a failed rank's traceback."""
    if torch.cuda.is_available():
        import pytest  # scripts/gpu_check imports this module without it

        pytest.skip("ranks are forks, which CUDA does not allow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ends, ranks = [], []
    for rank in range(world_size):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_rank, args=(function, rank, world_size, port, sender), daemon=True)
        process.start()
        sender.close()
        ends.append(receiver)
        ranks.append(process)
    try:
        found = [
            end.recv() if end.poll(LIMIT) else (False, f"rank {i} took over {LIMIT} s") for i, end in enumerate(ends)
        ]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    for done, value in found:
        assert done, value
    return [value for _, value in found]


def _rank(function: Callable[[int], Any], rank: int, world_size: int, port: int, answer: Connection) -> None:
    from accelerate.state import AcceleratorState

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)  # the threads of a forked OpenMP pool do not exist
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        value = function(rank)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # rank 0 holds the store that the others use
        answer.send((True, value))
    except BaseException:
        answer.send((False, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        answer.close()
        os._exit(0)  # run neither atexit functions nor the parent's pytest
