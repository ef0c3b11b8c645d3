"""Launch shortcut: the GPU receives what Triton itself would pass, and Triton launches where the shortcut cannot."""

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: there is nothing to launch without it")

from ligertune_kernels import AdamWOptions, adamw_step, launcher, shortcuts
from ligertune_kernels.launcher import BoundLaunch, tl, triton
from ligertune_kernels.ops.attention import rope
from ligertune_kernels.ops.mlp import kernels as gated
from ligertune_kernels.ops.norms.kernels import NormOptions, norm_forward
from support.kernels.pretend_gpu import TARGETS, PretendDriver, compile_for
from triton import knobs

pytestmark = pytest.mark.skipif(launcher.INTERPRETED, reason="the interpreter compiles nothing")
GRID, INTEGERS, OTHERS = (3, 2, 1), (16, 7), (5, 0.5)
FIRST_ARGUMENT = 9  # after grid, stream, function, metadata of the kernel, metadata of the launch, two hooks


class MetaOnGpu(torch.Tensor):
    """A meta tensor that claims to lie on a GPU, at an address."""

    is_cuda, address, index = True, 4096, 0

    def get_device(self) -> int:
        return self.index

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Record the arguments of each call of Triton's launcher."""
    calls: list[tuple] = []
    recorder = staticmethod(lambda src, metadata: lambda *args: calls.append(args))
    monkeypatch.setattr(PretendDriver, "launcher_cls", recorder)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(shortcuts, "_current_device", lambda: 0)
    monkeypatch.setattr(shortcuts, "_current_stream", lambda index: 0)
    return calls


def on_gpu(dtype: torch.dtype, *shape: int) -> MetaOnGpu:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(MetaOnGpu)


@triton.jit(do_not_specialize=["n"])
def some_kernel(x_ptr, y_ptr, stride, columns, n, eps, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x + eps if FLAG else x, mask=offs < columns)


def launch_times(times: int, tensors: list[MetaOnGpu], before_last=lambda: None) -> None:
    launch = BoundLaunch(some_kernel, {"BLOCK": 64, "FLAG": True, "num_warps": 4}, INTEGERS)

    def run() -> None:
        for time in range(times):
            if time == times - 1:
                before_last()
            launch(GRID, tuple(tensors), *OTHERS)

    compile_for(TARGETS["sm90"], run)


def test_second_launch_passes_what_triton_passed_at_the_first(received) -> None:
    x, y = on_gpu(torch.float32, 64), on_gpu(torch.bfloat16, 64)
    y.address = 8192
    launch_times(2, [x, y])
    first, second = received
    assert second[:6] == first[:6] and second[:3] == GRID
    assert second[6:FIRST_ARGUMENT] == (None, None, None)
    assert first[FIRST_ARGUMENT:] == (x, y, *INTEGERS, *OTHERS, True, 64)
    assert second[FIRST_ARGUMENT:] == (4096, 8192, *INTEGERS, *OTHERS, True, 64)


@pytest.mark.parametrize("on, address", [(True, 4096), (True, 4100), (False, 4096)])
def test_triton_launches_unaligned_tensors_and_without_the_shortcut(on, address, received, monkeypatch) -> None:
    if not on:
        monkeypatch.setattr(shortcuts, "ON", False)
    x = on_gpu(torch.float32, 64)
    launch_times(3, [x, x], lambda: setattr(x, "address", address))
    assert [call[FIRST_ARGUMENT] is x for call in received] == [True, not on, not on or address == 4100]
    assert received[2][4:6] == received[0][4:6]  # one compiled form: meta tensors count as aligned


def test_launch_hooks_are_called(received) -> None:
    seen: list[object] = []
    launch_times(2, [on_gpu(torch.float32, 64)] * 2, lambda: knobs.runtime.launch_enter_hook.add(seen.append))
    knobs.runtime.launch_enter_hook.remove(seen.append)
    assert received[1][6] is not None  # the launch's metadata, for the hook that Triton passes on
    assert shortcuts._has_launch_hooks() is False


@pytest.mark.parametrize("missing", ["run", "function", "packed_metadata"])
def test_a_triton_without_a_private_name_launches_every_time(missing, received) -> None:
    compiled = SimpleNamespace(run=print, function=1, packed_metadata=(4,))
    save = lambda: shortcuts.save_launch(compiled, some_kernel, (on_gpu(torch.float32, 64),), (), {})  # noqa: E731
    assert save() is not None
    delattr(compiled, missing)
    assert save() is None


def test_launches_on_the_device_of_the_tensors(received, monkeypatch) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        with monkeypatch.context() as inside:
            inside.setattr(shortcuts, "_current_device", lambda: index)
            yield

    monkeypatch.setattr(torch.cuda, "device", device)
    x = on_gpu(torch.float32, 64)
    x.index = 1
    launch_times(2, [x, on_gpu(torch.float32, 64)])
    assert entered == [1, 1] and len(received) == 2


bf16 = partial(on_gpu, torch.bfloat16)


def adamw(step: int) -> None:
    options = AdamWOptions(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    adamw_step(*(bf16(64, 32) for _ in range(4)), options, step=step)


def rotate(tokens: int, **how: bool) -> None:
    q, k = (bf16(1, tokens, heads, 64).transpose(1, 2) for heads in (4, 2))
    rope._rotate(q, k, bf16(1, tokens, 64), bf16(1, tokens, 64), None, rope.RopeLayout(False, False, 64), **how)


# Each runs twice, the second time with other values of what is not compiled in.
TWICE = {
    "swiglu": lambda rows: gated._forward(bf16(rows, 512), bf16(rows, 512), gated.GateForm("silu")),
    "geglu, backward": lambda rows: gated._backward(*(bf16(rows, 512) for _ in range(5)), gated.GateForm("gelu_tanh")),
    "apply_rope": rotate,
    "apply_rope, backward": lambda tokens: rotate(tokens, backward=True),
    "rms_norm": lambda rows: norm_forward(bf16(rows, 512), None, bf16(512), None, NormOptions(1e-6)),
    "adamw_step": adamw,
}


@pytest.mark.parametrize("op", TWICE)
def test_second_call_of_an_op_passes_what_triton_would(op, received, monkeypatch) -> None:
    """Compared with a third call, which Triton launches: the same kernel and numbers, addresses for tensors."""

    def run() -> None:
        TWICE[op](32)
        TWICE[op](48)
        monkeypatch.setattr(shortcuts, "_has_launch_hooks", lambda: True)
        TWICE[op](48)

    compile_for(TARGETS["sm90"], run)
    _, short, by_triton = received
    assert short[:6] == by_triton[:6]  # grid, stream, function and metadata
    passed = [4096 if isinstance(argument, torch.Tensor) else argument for argument in by_triton[FIRST_ARGUMENT:]]
    assert list(short[FIRST_ARGUMENT:]) == passed
