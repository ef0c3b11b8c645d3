"""Launch: the GPU receives what Triton itself would pass, and Triton is asked where the short way is not open."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: there is nothing to launch without it")

from ligertune_kernels import launch
from ligertune_kernels.launch import Launch, tl, triton
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
