"""Checks of the ops' arguments: they read shapes, dtypes and devices, so that the host never waits for a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_TAPS = 8


def check_tensors(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise unless all arguments are tensors of floats on the device of the first one; None is not checked.

    Raises TypeError for other objects, ValueError for other dtypes and devices.
    """
    device = None
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} is a {type(t).__name__}; expected a tensor")
        if not t.is_floating_point():
            raise ValueError(f"{op}: {name} is {t.dtype}; expected a float dtype")
        if device is None:
            device = t.device
        elif t.device != device:
            first = next(iter(tensors))
            raise ValueError(f"{op}: {name} is on {t.device} and {first} on {device}; expected one device")


def check_given(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise TypeError if a tensor that an op cannot do without is None."""
    for name, t in tensors.items():
        if t is None:
            raise TypeError(f"{op}: {name} is None; expected a tensor")


def check_convolution(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> None:
    """Raise TypeError for what is no tensor, ValueError where shapes, dtypes or devices do not belong together."""
    if x is None or weight is None:
        check_given(op, x=x, weight=weight)
    check_tensors(op, x=x, weight=weight, bias=bias)
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or not 2 <= weight.shape[1] <= MAX_TAPS:
        raise ValueError(f"{op}: x {tuple(x.shape)}, weight {tuple(weight.shape)}; expected (B, C, T) and (C, 2 to 8)")
    if bias is not None and bias.shape != x.shape[1:2]:
        raise ValueError(f"{op}: bias {tuple(bias.shape)}; expected {tuple(x.shape[1:2])}")
    if activation not in (None, "silu"):
        raise ValueError(f'{op}: activation is {activation!r}; expected "silu" or None')


def check_conv_state(op: str, x: torch.Tensor, conv_state: torch.Tensor, taps: int) -> None:
    """Raise as `check_convolution` if a state (B, C, S) does not belong to x (B, C, L)."""
    if conv_state is None:
        check_given(op, conv_state=conv_state)
    check_tensors(op, x=x, conv_state=conv_state)
    if conv_state.ndim != 3 or conv_state.shape[:2] != x.shape[:2] or conv_state.shape[-1] < taps - 1:
        raise ValueError(
            f"{op}: conv_state is {tuple(conv_state.shape)}; expected {tuple(x.shape[:2])} and {taps - 1} places or "
            "more"
        )


def check_rule(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    decays_of_channels: bool = False,
) -> None:
    """Raise TypeError for what is no tensor, ValueError where shapes, dtypes or devices do not belong together.

    decays_of_channels: decay is (B, T, X, K), not (B, T, X).
    """
    if any(t is None for t in (query, key, value, decay, beta)):
        check_given(op, query=query, key=key, value=value, decay=decay, beta=beta)
    check_tensors(op, query=query, key=key, value=value, decay=decay, beta=beta, initial_state=initial_state)
    if query.ndim != 4 or value.ndim != 4 or query.shape != key.shape or query.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"{op}: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; "
            "expected twice (B, T, H, K) and (B, T, X, V)"
        )
    heads = key.shape[2]
    value_heads = value.shape[2]
    if heads == 0 or value_heads % heads:
        raise ValueError(f"{op}: {value_heads} value heads and {heads} key heads; expected a multiple")
    if not (query.dtype == key.dtype == value.dtype):
        raise ValueError(
            f"{op}: query is {query.dtype}, key {key.dtype}, value {value.dtype}; expected one float dtype"
        )
    if not query.shape[3]:
        raise ValueError(f"{op}: query is {tuple(query.shape)}; expected heads of at least one column")
    places = tuple(value.shape[:3])
    channels = (key.shape[3],) if decays_of_channels else ()
    for name, t, expected in (("decay", decay, places + channels), ("beta", beta, places)):
        if t.shape != expected:
            raise ValueError(f"{op}: {name} is {tuple(t.shape)}; expected {expected}")
    if initial_state is not None:
        expected = (value.shape[0], value_heads, key.shape[3], value.shape[3])
        if initial_state.shape != expected:
            raise ValueError(f"{op}: initial_state is {tuple(initial_state.shape)}; expected {expected}")


class SsdTensors(NamedTuple):
    """The tensors of ssd, with tokens, and of a step, without."""

    x: torch.Tensor  # (..., H, P)
    dt: torch.Tensor  # (..., H)
    A: torch.Tensor  # (H,)
    B: torch.Tensor  # (..., G, N)
    C: torch.Tensor  # (..., G, N)
    D: torch.Tensor | None  # (H,) or (H, P)
    z: torch.Tensor | None  # as x
    dt_bias: torch.Tensor | None  # (H,)


def check_ssd(op: str, tensors: SsdTensors, dt_limit: tuple[float, float]) -> None:
    """Raise TypeError for what is no tensor, ValueError where shapes, dtypes, devices or limits do not fit."""
    x, dt, A, B, C, D, z, dt_bias = tensors
    if any(t is None for t in tensors[:5]):
        check_given(op, x=x, dt=dt, A=A, B=B, C=C)
    check_tensors(op, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    if x.ndim < 3 or B.ndim != x.ndim or B.shape != C.shape or B.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)}; expected (..., H, P) and twice "
            "(..., G, N)"
        )
    if not (x.dtype == B.dtype == C.dtype):
        raise ValueError(f"{op}: x is {x.dtype}, B {B.dtype}, C {C.dtype}; expected one float dtype")
    if z is not None and z.dtype != x.dtype:
        raise ValueError(f"{op}: z is {z.dtype} and x {x.dtype}; expected one float dtype")
    _check_ssd_heads(op, tensors)
    low, high = dt_limit
    if not low <= high:
        raise ValueError(f"{op}: dt_limit is {tuple(dt_limit)}; expected the smallest and the largest dt")


def _check_ssd_heads(op: str, tensors: SsdTensors) -> None:
    """Raise ValueError where shapes do not belong to the heads of x and the groups of B."""
    x = tensors.x
    heads, head_dim = x.shape[-2:]
    groups, state_dim = tensors.B.shape[-2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"{op}: {heads} heads and {groups} groups; expected a multiple")
    if not state_dim:
        raise ValueError(f"{op}: B is {tuple(tensors.B.shape)}; expected states of at least one column")
    of_heads = (heads,)
    for name, shape in (("dt", x.shape[:-1]), ("A", of_heads), ("z", x.shape), ("dt_bias", of_heads)):
        t = getattr(tensors, name)
        if t is not None and t.shape != shape:
            raise ValueError(f"{op}: {name} is {tuple(t.shape)}; expected {tuple(shape)}")
    D = tensors.D
    if D is not None and D.shape not in (of_heads, (heads, head_dim)):
        raise ValueError(f"{op}: D is {tuple(D.shape)}; expected {of_heads} or {(heads, head_dim)}")


def check_documents(op: str, documents: tuple[torch.Tensor, ...] | None, value: torch.Tensor) -> None:
    """Raise ValueError if documents (starts, ends) are not those of a packed row of `value` (1, T, X, V)."""
    if documents is None:
        return
    starts, ends = documents[:2]
    if value.shape[0] != 1 or starts.shape != value.shape[1:2] or ends.shape != value.shape[1:2]:
        raise ValueError(
            f"{op}: documents have starts {tuple(starts.shape)} and value {tuple(value.shape)}; "
            "expected (T,) and (1, T, X, V)"
        )
