"""Launch: the GPU receives what Triton itself would pass, and Triton is asked where the short way is not open."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: there is nothing to launch without it")

from ligertune_kernels import adamw_step
from ligertune_kernels import launcher as launch
from ligertune_kernels.launcher import Launch, tl, triton
from ligertune_kernels.ops.attention import rope
from ligertune_kernels.ops.mlp import _gated as gated
from ligertune_kernels.ops.norms._row_norm import norm_forward
from pretend_gpu import TARGETS, PretendDriver, compile_for
from triton import knobs

pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter compiles nothing")
GRID, INTEGERS, OTHERS = (3, 2, 1), (16, 7), (5, 0.5)


class Posing(torch.Tensor):
    """A meta tensor that poses as one of GPU 0, at an address."""

    is_cuda, address, index = True, 4096, 0

    def get_device(self) -> int:
        return self.index

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What Triton's launcher receives, call by call."""
    calls: list[tuple] = []
    recorder = staticmethod(lambda src, metadata: lambda *args: calls.append(args))
    monkeypatch.setattr(PretendDriver, "launcher_cls", recorder)
    monkeypatch.setattr(launch, "_current_index", lambda: 0)
    monkeypatch.setattr(launch, "_current_stream", lambda index: 0)
    return calls


def posing(dtype: torch.dtype = torch.float32) -> Posing:
    return torch.empty(64, dtype=dtype, device="meta").as_subclass(Posing)


@triton.jit(do_not_specialize=["n"])
def some_kernel(x_ptr, y_ptr, stride, columns, n, eps, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x + eps if FLAG else x, mask=offs < columns)


def launched(times: int, tensors: list[Posing], before_the_last=lambda: None) -> Launch:
    some = Launch(some_kernel, {"BLOCK": 64, "FLAG": True, "num_warps": 4}, INTEGERS)

    def run() -> None:
        for time in range(times):
            if time == times - 1:
                before_the_last()
            some(GRID, tuple(tensors), *OTHERS)

    compile_for(TARGETS["sm90"], run)
    return some


def test_the_second_launch_passes_what_triton_passed_at_the_first(reached) -> None:
    x, y = posing(), posing(torch.bfloat16)
    y.address = 8192
    launched(2, [x, y])
    first, second = reached
    arguments = 9  # grid, stream, function, metadata of the kernel, of the launch, two hooks; then the kernel's own
    assert second[:6] == first[:6] and second[:3] == GRID
    assert second[6:arguments] == (None, None, None)
    assert first[arguments:] == (x, y, *INTEGERS, *OTHERS, True, 64)
    assert second[arguments:] == (4096, 8192, *INTEGERS, *OTHERS, True, 64)


def test_a_tensor_off_the_alignment_has_triton_choose_another_form(reached) -> None:
    x, y = posing(), posing()
    launched(3, [x, y], lambda: setattr(x, "address", 4100))
    assert [call[9] is x for call in reached] == [True, False, True]
    assert reached[2][4:6] == reached[0][4:6]  # meta tensors have one form: what counts is who was asked


def test_whoever_watches_launches_sees_them(reached) -> None:
    seen: list[object] = []
    launched(2, [posing(), posing()], lambda: knobs.runtime.launch_enter_hook.add(seen.append))
    knobs.runtime.launch_enter_hook.remove(seen.append)
    assert reached[1][6] is not None  # the launch's metadata, for the hook that Triton passes on
    assert launch._is_watched() is False


def test_a_triton_of_other_names_is_asked_every_time(reached) -> None:
    some = Launch(some_kernel, {}, ())
    assert some._form_of(SimpleNamespace(run=print, function=1)) is None
    assert some._form_of(SimpleNamespace(run=print, function=1, packed_metadata=(4,))) is not None


def test_launches_on_the_device_of_the_tensors(reached, monkeypatch) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            monkeypatch.setattr(launch, "_current_index", lambda: self.index)

        def __exit__(self, *args: object) -> None:
            monkeypatch.setattr(launch, "_current_index", lambda: 0)

    monkeypatch.setattr(torch.cuda, "device", Device)
    x = posing()
    x.index = 1
    launched(2, [x, posing()])
    assert entered == [1, 1] and len(reached) == 2


SCRATCH = dict.fromkeys(("global_scratch_size", "global_scratch_align", "profile_scratch_size"), 0)
HELD = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": True, "warp_size": 64, **SCRATCH}
HELD |= {"profile_scratch_align": 1, "arg_annotations": (), "kernel_signature": b"signature"}
FUNCTION, METADATA, CONSTANTS = 11, (4, 1), {"FLAG": True, "BLOCK": 64}


class Flat:
    """As in triton 3.6: the kernel's arguments are handed on one by one."""

    global_scratch_size = 0

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: object) -> None:
        self.launch(x, y, z, stream, function, False, None, *args)


class Turned(Flat):
    def __call__(self, x: int, y: int, z: int, *args: object) -> None:
        self.launch(z, y, x, *args)


def installed(backend: str, name: str) -> type:
    return getattr(importlib.import_module(f"triton.backends.{backend}.driver"), name)


def form_of(kind: type, calls: list[tuple], **held: object) -> tuple[launch._Form, object]:
    """The form of a kernel whose launcher is of this kind, made without the driver that its making asks; and that."""
    launcher = kind.__new__(kind)
    vars(launcher).update(HELD | {"launch": lambda *args: calls.append(args)} | held)
    compiled = SimpleNamespace(run=launcher, function=FUNCTION, packed_metadata=METADATA)
    return Launch(some_kernel, CONSTANTS, INTEGERS)._form_of(compiled), launcher


@pytest.mark.parametrize("kind", [("nvidia", "CudaLauncher"), ("amd", "HIPLauncher"), None], ids=str)
def test_what_tritons_launcher_calls_is_called_at_once(kind, reached) -> None:
    calls: list[tuple] = []
    some = Launch(some_kernel, CONSTANTS, INTEGERS)
    some._form, launcher = form_of(Flat if kind is None else installed(*kind), calls)
    assert some._form.run is launcher.launch
    some._index = 0
    some(GRID, (posing(), posing()), *OTHERS)
    arguments = (4096, 4096, *INTEGERS, *OTHERS, *CONSTANTS.values())
    launcher(*GRID, 0, FUNCTION, METADATA, None, None, None, *arguments)
    assert len(calls) == 2 and calls[0] == calls[1]


@pytest.mark.parametrize(
    "kind, held",
    [
        pytest.param(Flat, {"global_scratch_size": 128}, id="it allocates"),
        pytest.param(Turned, {}, id="it turns the grid round"),
    ],
)
def test_a_launcher_that_does_more_than_hand_on_is_called_itself(kind, held, reached) -> None:
    form, launcher = form_of(kind, [], **held)
    assert form.run is launcher and form.before == () and not form.packed


def bf16(*shape: int) -> Posing:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta").as_subclass(Posing)


def adamw(step: int) -> None:
    numbers = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    adamw_step(*(bf16(64, 32) for _ in range(4)), step=step, **numbers)


def rotate(tokens: int, **how: bool) -> None:
    q, k = (bf16(1, tokens, heads, 64).transpose(1, 2) for heads in (4, 2))
    rope._rotate(q, k, bf16(1, tokens, 64), bf16(1, tokens, 64), None, False, 64, **how)


# what runs twice, the second time on other sizes of what is not compiled in
TWICE = {
    "swiglu": lambda rows: gated.forward(bf16(rows, 512), bf16(rows, 512), "silu"),
    "geglu, backward": lambda rows: gated._backward(*(bf16(rows, 512) for _ in range(5)), "gelu_tanh"),
    "apply_rope": rotate,
    "apply_rope, backward in place": lambda tokens: rotate(tokens, backward=True, inplace=True),
    "rms_norm": lambda rows: norm_forward(bf16(rows, 512), None, bf16(512), None, 1e-6),
    "adamw_step": adamw,
}


@pytest.mark.parametrize("op", TWICE)
def test_the_second_call_of_an_op_passes_what_triton_would(op, reached, monkeypatch) -> None:
    """Beside a call that Triton is asked for: the same kernel, the same numbers, addresses for tensors."""

    def run() -> None:
        TWICE[op](32)
        TWICE[op](48)
        monkeypatch.setattr(launch, "_is_watched", lambda: True)
        TWICE[op](48)

    compile_for(TARGETS["sm90"], run)
    _, short, asked = reached
    assert short[:6] == asked[:6]  # grid, stream, function and metadata
    passed = [4096 if isinstance(argument, torch.Tensor) else argument for argument in asked[9:]]
    assert list(short[9:]) == passed
