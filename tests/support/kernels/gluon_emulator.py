"""CPU emulator of the Gluon and Triton functions that the kernels for Hopper use, to find races.

Triton's interpreter has no warp specialisation, asynchronous copies or barriers. Here each partition of a program is a
Python thread. Only one thread runs at a time; a scheduler switches between them at random and slows some down for a
while. A copy to shared memory arrives at a random time, and its tile holds NaN until then. A matrix product reads its
tiles twice, when it starts and when it is waited for, and compares them. A missing barrier therefore shows as a `Race`
or a wrong result, and a wrong barrier as a `Deadlock`.

Not emulated: layouts, fences between ordinary and asynchronous accesses, warps of one partition at different places,
and Triton's compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SLOW = 0.02  # share of the turns of a slow thread
SHIFT = 200  # turns after which other threads are slow
PATIENCE = 20_000  # turns in which no barrier or counter changes


class Race(AssertionError):
    """Shared memory is read while it is written, or before."""


class Deadlock(AssertionError):
    """All threads wait."""


# ---- threads


class Agent(threading.Thread):
    """A partition of a program. It runs while it holds the scheduler's turn."""

    def __init__(self, scheduler: Scheduler, program: int, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.scheduler, self.program, self.call = scheduler, program, call
        self.go, self.error, self.finished = threading.Semaphore(0), None, False
        self.products: list[Product] = []
        self.stores: list[Store] = []  # copies from shared memory, the first one first

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.scheduler.stopped:
                self.call()
        except BaseException as error:
            self.error = error
        self.finished = True
        self.scheduler.turn.release()

    def pause(self) -> None:
        """Let others run."""
        self.scheduler.turn.release()
        self.go.acquire()
        if self.scheduler.stopped:
            raise SystemExit


class Scheduler:
    """Runs the programs of one launch at once, in an order that the seed gives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.agents: list[Agent] = []
        self.events: list[Callable[[], None]] = []  # copies
        self.turn, self.stopped = threading.Semaphore(0), False
        self.programs = self.quiet = 0

    def start(self, program: int, call: Callable[[], object]) -> Agent:
        agent = Agent(self, program, call)
        agent.start()
        self.agents.append(agent)
        return agent

    def run(self) -> None:
        turns, weights = 0, []
        try:
            while self.agents or self.events:
                if turns % SHIFT == 0 or len(weights) != len(self.agents):
                    weights = [self.random.choice((1, 1, 1, SLOW)) for _ in self.agents]
                turns, self.quiet = turns + 1, self.quiet + 1
                if self.quiet > PATIENCE:
                    raise Deadlock(f"{len(self.agents)} threads wait")
                if self.events and (not self.agents or self.random.random() < 0.2):
                    self.events.pop(self.random.randrange(len(self.events)))()
                    self.quiet = 0
                    continue
                self._resume(self.random.choices(self.agents, weights)[0])
        finally:
            self.stopped = True
            for agent in self.agents:
                agent.go.release()

    def _resume(self, agent: Agent) -> None:
        agent.go.release()
        self.turn.acquire()
        if agent.finished:
            self.agents.remove(agent)
            self.quiet = 0
            if agent.error is not None:
                raise agent.error


def _agent() -> Agent:
    agent = threading.current_thread()
    assert isinstance(agent, Agent)
    return agent


# ---- memory


class Pointer:
    """Elements of a tensor in global memory. Accesses outside of it are errors."""

    def __init__(self, data: Tensor, offset: Tensor | int = 0) -> None:
        self.data, self.offset = data, offset

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, offset: Tensor | int) -> Pointer:
        return Pointer(self.data, self.offset + offset)

    def __sub__(self, offset: Tensor | int) -> Pointer:
        return Pointer(self.data, self.offset - offset)

    def places(self, mask: Tensor | bool | None) -> tuple[Tensor, Tensor]:
        places = torch.as_tensor(self.offset)
        mask = torch.ones_like(places, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        places, mask = torch.broadcast_tensors(places, mask)
        outside = mask & ((places < 0) | (places >= self.data.numel()))
        if outside.any():
            raise IndexError(f"element {int(places[outside][0])} of {self.data.numel()}")
        return torch.where(mask, places, 0), mask


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
    places, inside = pointer.places(mask)
    return torch.where(inside, pointer.data[places], torch.as_tensor(other, dtype=pointer.data.dtype))


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    places, inside = pointer.places(mask)
    pointer.data[places[inside]] = value.broadcast_to(places.shape)[inside].to(pointer.data.dtype)


def atomic_add(pointer: Pointer, value: Tensor | int, sem: str, scope: str = "gpu") -> Tensor:
    _agent().pause()
    places, _ = pointer.places(None)
    before = pointer.data[places]
    pointer.data[places] = before + value
    if not isinstance(value, int) or value:
        _agent().scheduler.quiet = 0
    return before


class Shared:
    """A tile of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: self.data.shape)

    def index(self, i: int) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: object = None) -> Tensor:
        if self.data.isnan().any():
            raise Race("a tile is read that was not written")
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype and value.shape == self.shape
        _agent().pause()
        self.data.copy_(value)


class Descriptor:
    """Stands for TensorDescriptor. Outside of the tensor copies read zeros and write nothing."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block: list[int], layout: object) -> None:
        self.view, self.block, self.layout, self.dtype = base.as_strided(shape, strides), block, layout, base.dtype
        self.block_type = SimpleNamespace(shape=block, nbytes=torch.Size(block).numel() * base.itemsize)

    def parts(self, place: list[Tensor | int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return what a block takes of the tensor, and where it lies within the block."""
        taken = []
        for start, size, length in zip(map(int, place), self.block, self.view.shape, strict=True):
            taken.append(slice(min(start, length), min(start + size, length)))
        return tuple(taken), tuple(slice(0, part.stop - part.start) for part in taken)


def copy_to_shared(descriptor: Descriptor, place: list, barrier: Barrier, tile: Shared) -> None:
    assert list(tile.shape) == descriptor.block
    _agent().pause()
    tile.data.fill_(float("nan"))
    taken, within = descriptor.parts(place)

    def arrive() -> None:
        tile.data.zero_()
        tile.data[within] = descriptor.view[taken]
        barrier.complete(descriptor.block_type.nbytes)

    _agent().scheduler.events.append(arrive)


class Store:
    """A copy from shared memory, which ends when it is called."""

    def __init__(self, descriptor: Descriptor, place: list, tile: Shared) -> None:
        self.view, self.tile, self.ended = descriptor.view, tile, False
        self.taken, self.within = descriptor.parts(place)

    def __call__(self) -> None:
        self.view[self.taken] = self.tile.load()[self.within]
        self.ended = True


def copy_from_shared(descriptor: Descriptor, place: list, tile: Shared) -> None:
    agent = _agent()
    agent.stores.append(Store(descriptor, place, tile))
    agent.scheduler.events.append(agent.stores[-1])


def store_wait(pendings: int) -> None:
    """Wait until all copies but the last ones have ended."""
    agent = _agent()
    earlier = agent.stores[: len(agent.stores) - pendings] if len(agent.stores) > pendings else []
    while not all(store.ended for store in earlier):
        agent.pause()


class Barrier:
    """An mbarrier: a phase ends when all threads have arrived and all bytes have been copied."""

    def __init__(self) -> None:
        self.count = self.missing = self.phase = self.bytes = 0

    def index(self, i: int) -> Barrier:
        assert int(i) == 0
        return self

    def arrive(self, bytes: int = 0) -> None:
        self.missing -= 1
        self.bytes += bytes
        assert self.missing >= 0, "more arrivals than a phase has"
        self._end()

    def complete(self, bytes: int) -> None:
        self.bytes -= bytes
        self._end()

    def _end(self) -> None:
        _quiet_ends()
        if self.missing == self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


def _quiet_ends() -> None:
    agent = threading.current_thread()
    if isinstance(agent, Agent):
        agent.scheduler.quiet = 0


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def wait(barrier: Barrier, parity: int, pred: bool = True) -> None:
    _agent().pause()
    while pred and barrier.phase % 2 == int(parity):
        _agent().pause()


def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
    assert count == 1
    _agent().pause()
    if pred:
        barrier.arrive()


# ---- products


class Product:
    """A matrix product that runs until it is waited for."""

    def __init__(self, a: Tensor | Shared, b: Shared, acc: Tensor | Product | None) -> None:
        self.operands, self.acc, self.value = (a, b), acc, None
        self.seen = self._read()

    def _read(self) -> list[Tensor]:
        return [(one.load() if isinstance(one, Shared) else one).float() for one in self.operands]

    def finish(self) -> None:
        a, b = self._read()
        if not (torch.equal(a, self.seen[0]) and torch.equal(b, self.seen[1])):
            raise Race("a tile changes while a product reads it")
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = a @ b if acc is None else acc + a @ b


def warpgroup_mma(
    a: Tensor | Shared, b: Shared, acc: Tensor | Product, *, use_acc: bool = True, is_async: bool = False
) -> Tensor | Product:
    product = Product(a, b, acc if use_acc else None)
    _agent().products.append(product)
    _agent().pause()
    return product if is_async else warpgroup_mma_wait(0, deps=[product])


def warpgroup_mma_wait(pending: int, deps: list) -> Any:
    agent = _agent()
    agent.pause()
    while len(agent.products) > pending:
        agent.products.pop(0).finish()
    found = [one.value if isinstance(one, Product) else one for one in deps]
    assert all(one is not None for one in found), "a product is used that was not waited for"
    return found[0] if len(found) == 1 else tuple(found)


# ---- launches


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements from the tensor's first on, as a pointer sees them."""
    first = tensor.storage_offset()
    size = tensor.untyped_storage().nbytes() // tensor.itemsize - first
    return tensor.as_strided((size,), (1,), first)


class Function:
    """Stands for a function under `jit`."""

    seed = 0

    def __init__(self, call: Callable) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **constants: Any) -> None:
            scheduler = Scheduler(Function.seed)
            scheduler.programs = grid[0]
            given = [Pointer(_flat(one)) if isinstance(one, Tensor) else one for one in args]
            for program in range(grid[0]):
                scheduler.start(program, lambda: self.call(*given, **constants))
            scheduler.run()

        return launch


def jit(call: Callable | None = None, **options: object) -> Any:
    return Function if call is None else Function(call)


class Launcher:
    """Stands for the package's launcher."""

    def __init__(self, kernel: Function, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants

    def __call__(self, grid: tuple[int, ...], tensors: tuple[Tensor, ...], integers: tuple, *others: Any) -> None:
        self.kernel[grid](*tensors, *integers, *others, **self.constants)


class Constant(int):
    """Stands for a constexpr of an integer."""

    value = property(int)


def warp_specialize(partitions: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
    agent = _agent()
    started = [
        agent.scheduler.start(agent.program, lambda call=call, given=given: call(*given)) for call, given in partitions
    ]
    while not all(one.finished for one in started):
        agent.pause()


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
    if dtype != torch.int64:
        return Shared(torch.full(shape, float("nan"), dtype=dtype))
    barriers = [Barrier() for _ in range(shape[0])]
    return barriers[0] if shape == [1] else SimpleNamespace(index=lambda i: barriers[int(i)])


def _both(function: Callable) -> Callable:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _none(*args: object) -> None:
    return None


LANGUAGE = SimpleNamespace(
    constexpr=lambda value: Constant(value) if type(value) is int else value,
    float32=torch.float32, int32=torch.int32, int64=torch.int64,
    program_id=lambda axis: torch.tensor(_agent().program), num_programs=lambda axis: _agent().scheduler.programs,
    arange=lambda start, end, layout=None: torch.arange(start, end),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    load=load, store=store, atomic_add=atomic_add, static_range=range,
    where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
    maximum=_both(torch.maximum), minimum=_both(torch.minimum), cdiv=lambda a, b: (a + b - 1) // b,
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
    convert_layout=lambda x, layout: x, multiple_of=lambda x, factors: x, max_contiguous=lambda x, factors: x,
    warp_specialize=warp_specialize, allocate_shared_memory=allocate_shared_memory,
    SliceLayout=_none, DotOperandLayout=_none, NVMMADistributedLayout=_none, NVMMASharedLayout=_none,
    SwizzledSharedLayout=_none,
)  # fmt: skip
HOPPER = SimpleNamespace(
    warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait, fence_async_shared=_none,
    tma=SimpleNamespace(store_wait=store_wait),
    mbarrier=SimpleNamespace(
        MBarrierLayout=_none, init=init, wait=wait, arrive=arrive, expect=lambda barrier, bytes: barrier.arrive(bytes)
    ),
)  # fmt: skip


@contextlib.contextmanager
def emulated(name: str, *others: str) -> Iterator[ModuleType]:
    """Import a module of kernels, whose launches are emulated. others: modules that it takes kernels from."""
    launcher = ModuleType("ligertune_kernels.launcher")
    launcher.__dict__.update(
        gl=LANGUAGE, tl=LANGUAGE, gluon=SimpleNamespace(jit=jit), triton=SimpleNamespace(jit=jit), hopper=HOPPER,
        copy_to_shared=copy_to_shared, copy_from_shared=copy_from_shared, TensorDescriptor=Descriptor,
        on_device=lambda tensor: contextlib.nullcontext(), Launcher=Launcher, cached=lambda function: function,
    )  # fmt: skip
    replaced = (launcher.__name__, "ligertune_kernels.jit.device_functions", name, *others)
    real = {key: importlib.import_module(key) for key in replaced}
    for key in replaced:
        del sys.modules[key]
    sys.modules[launcher.__name__] = launcher
    try:
        yield importlib.import_module(name)
    finally:
        sys.modules.update(real)
        for key, module in real.items():  # the packages' attributes
            package, _, leaf = key.rpartition(".")
            setattr(sys.modules[package], leaf, module)
