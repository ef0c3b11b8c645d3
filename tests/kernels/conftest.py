"""Device of the kernel tests: the GPU if there is one, else the CPU.

On a CPU the tests of ops run in a separate process under Triton's interpreter (test_under_interpreter.py), because
TRITON_INTERPRET is read when the kernels are decorated. In this process every op runs its reference, except for losses
and divergences, which have a form in torch.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from ligertune_kernels import backend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

PRODUCTS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
CHECKPOINTING = ({"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": PRODUCTS})
# folders of ops without a form in torch
ONLY_REFERENCES = {"norms", "attention", "mlp", "moe", "float8", "block_scaled", "extra", "recurrence"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh", action="store_true", help="bring ahead_of_time.json up to date (test_ahead_of_time)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def no_reference_against_itself(request: pytest.FixtureRequest) -> None:
    """Skip where an op would be compared with the reference that it runs."""
    needs_kernels = "device" in request.fixturenames and request.path.parent.name in ONLY_REFERENCES
    if needs_kernels and backend(request.getfixturevalue("device")) == "reference":
        pytest.skip("a reference would be compared with itself; test_under_interpreter.py runs the kernels")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def peak_bytes(device: torch.device) -> Callable[[Callable[[], torch.Tensor]], int]:
    """Measure the most memory that a loss and its backward allocate on a GPU, cuBLAS's workspace included."""

    def peak(loss: Callable[[], torch.Tensor]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss().backward()
        return torch.cuda.max_memory_allocated(device) - before

    return peak


@pytest.fixture
def no_synchronisation(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function after whose call an operation that waits for the GPU raises an error, until the test ends."""
    torch.cuda.synchronize(device)
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=CHECKPOINTING, ids=["reentrant", "not reentrant", "products kept"])
def checkpointed(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """Call a function under one kind of activation checkpointing."""
    return partial(checkpoint, **request.param)
