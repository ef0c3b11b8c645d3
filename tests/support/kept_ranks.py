"""Ranks that stay: processes that train one run after another, because they take longer to start than a short run.

On a machine with a GPU ranks cannot be forks (`forked_ranks.py`). These are started once, for all tests of a process.
"""

import atexit
import functools
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

LIMIT = 180  # seconds that a run may take


class KeptRanks:
    """`world_size` processes. A run that fails or hangs on one of them ends all; the next run starts others."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: list[tuple[multiprocessing.Process, Connection]] = []
        atexit.register(self.close)

    def start(self) -> None:
        """Start the processes that are missing, and do not wait for their imports."""
        spawn = multiprocessing.get_context("spawn")
        for rank in range(len(self._ranks), self._world_size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, self._world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def train(self, folder: Path, changes: dict[str, object]) -> None:
        """Train the recipe of `recipe_for` on all ranks. Raises AssertionError with a failed rank's traceback."""
        self.start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for _, rank in self._ranks:
            rank.send((port, folder, changes))
        said = []
        for i, (_, rank) in enumerate(self._ranks):
            try:
                said.append(rank.recv() if rank.poll(LIMIT) else f"rank {i} took over {LIMIT} s")
            except EOFError:
                said.append(f"rank {i} ended")
            if said[-1] is not None:  # the others may wait for it
                self.close()
                raise AssertionError(said[-1])

    def close(self) -> None:
        """End the processes."""
        for process, rank in self._ranks:
            process.kill()
            process.join()
            rank.close()
        self._ranks = []


@functools.cache
def kept_ranks(world_size: int) -> KeptRanks:
    """Return the ranks of this process that train in groups of `world_size`."""
    return KeptRanks(world_size)


def _serve(rank: int, world_size: int, runs: Connection) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    from support.quickstart_runs import train

    while True:
        try:
            port, folder, changes = runs.recv()
        except EOFError:  # the parent has ended
            return
        os.environ["MASTER_PORT"] = str(port)
        try:
            train(folder, **changes)
            runs.send(None)
        except BaseException:
            runs.send(f"rank {rank}: {traceback.format_exc()}")
            return
