"""Device functions shared by kernels: activations, their derivatives and capped logits. All compute in fp32."""

from __future__ import annotations

from ligertune_kernels.launcher import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def fp32(scalar):
    """Convert a float argument to fp32."""
    # torch.compile passes Python floats as fp64, and the interpreter leaves them Python floats.
    return tl.full([], scalar, tl.float32)


@triton.jit
def tanh(x):
    # libdevice's tanh is missing from the interpreter; this differs by at most 1.8e-7 and cannot overflow.
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_grad(x):
    s = tl.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def gelu_tanh(x):
    # (1 + tanh(i)) / 2 = sigmoid(2i), which keeps its precision where tanh is near -1.
    return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))  # 2 sqrt(2 / pi) (x + 0.044715 x³)


@triton.jit
def gelu_tanh_grad(x):
    twice_i = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
    s = tl.sigmoid(twice_i)
    # sigmoid(-2i) is 1 - s without cancellation: its factors reach 50 where s is nearly 1.
    return s + x * s * tl.sigmoid(-twice_i) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def gelu_erf(x):
    return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def gelu_erf_grad(x):
    cdf = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
    return cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def scale_and_cap(x, softcap, logit_scale, HAS_SOFTCAP: tl.constexpr):
    """Return z = softcap tanh(logit_scale x / softcap) in bits, and dz/dx without the factor logit_scale."""
    if HAS_SOFTCAP:
        t = tanh(x * (logit_scale / softcap))
        return t * (softcap * LOG2E), 1.0 - t * t
    else:
        return x * (logit_scale * LOG2E), 1.0
