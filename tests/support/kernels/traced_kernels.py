"""Let torch.compile trace kernels on meta tensors for a GPU that is absent; their launches do nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from ligertune_kernels.chips import Chip
from ligertune_kernels.launcher import meta_runs_as
from torch._higher_order_ops import triton_kernel_wrap
from triton.runtime import driver

from support.kernels.pretend_gpu import PretendDriver


@contextmanager
def traced_for(
    target: Chip, monkeypatch: pytest.MonkeyPatch, runs_as: Callable[[Chip], AbstractContextManager] = meta_runs_as
) -> Iterator[None]:
    """runs_as: `meta_runs_as` of the package whose kernels are traced."""
    monkeypatch.setattr(driver, "_active", PretendDriver(target))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    for key in triton_kernel_wrap.triton_kernel_wrapper_mutation.py_kernels:
        if "CompositeExplicitAutograd" in str(key):
            kernels = triton_kernel_wrap.triton_kernel_wrapper_mutation.py_kernels
            monkeypatch.setitem(kernels, key, lambda **options: None)
    torch._dynamo.reset()
    with runs_as(target):
        yield
    torch._dynamo.reset()
