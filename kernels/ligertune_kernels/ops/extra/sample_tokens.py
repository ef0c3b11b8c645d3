r"""One token drawn from each row of logits, with random numbers that depend on the row's key alone.

    token = argmax_v  logit_v / T + g_v   over the v with logit_v / T >= least        g_v = -log(-log u_v)

This is a draw from softmax(logits / T) (Gumbel 1954), restricted to these v. u_v is a hash of (key of the row, v), so a
row draws the same token in any batch. Inverting the cumulative distribution would take one random number for a row,
and would let a rounding error in one logit change a token that has nothing to do with it. One pass over the logits also
gives log softmax(logits) of the token: before temperature and bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligertune_kernels.chips import Chip, launch_options
from ligertune_kernels.jit.device_functions import LN2, LOG2E, fp32
from ligertune_kernels.launcher import Launcher, cached, chip_of, runs_triton, tl, triton
from ligertune_kernels.ops.extra.tiles import SAMPLE_BLOCK

_FACTORS = (0x7FEB352D, 0x846CA68B)  # lowbias32, https://github.com/skeeto/hash-prospector
_GOLDEN = 0x9E3779B9
_UNIT = 2.0**-31


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def sample_tokens_reference(
    logits: Tensor, keys: Tensor, *, temperature: float, least: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `sample_tokens` in plain torch."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    noisy = logits
    if temperature:
        scores = logits * (1.0 / temperature)
        noisy = scores + gumbel_noise(keys, logits.shape[1])
        if least is not None:
            noisy = noisy.masked_fill(scores < least[:, None], float("-inf"))
    tokens = noisy.argmax(1)
    log_probs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)
    return tokens, log_probs.float()


def gumbel_noise(keys: Tensor, n_tokens: int) -> Tensor:
    """Return Gumbel noise (S, V) float32 for keys (S, 2) int32."""
    tokens = torch.arange(n_tokens, dtype=torch.int32, device=keys.device) * _signed(_GOLDEN)
    bits = mix(mix(tokens[None] + keys[:, :1]) ^ keys[:, 1:])
    # Numbers of 31 bits in (0, 1). Small ones give large noise, and float32 has many small numbers, so ties are rare.
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * _UNIT
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def mix(bits: Tensor) -> Tensor:
    """Hash int32 numbers. Products wrap around; the masks make shifts logical."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * _signed(_FACTORS[0])
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _signed(_FACTORS[1])
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def _mix(bits):
    """Hash uint32 numbers, as `mix` does."""
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _gumbel(tokens, first_key, second_key):
    bits = tokens.to(tl.uint32) * 0x9E3779B9 + first_key
    bits = _mix(_mix(bits) ^ second_key) & 0x7FFFFFFF
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    # log1p(-u), which the interpreter lacks: a series where 1 - u would round
    series = u * (1.0 + u * (0.5 + u * (0.33333333333 + u * 0.25)))
    exponential = tl.where(u < 0.005, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _sample_kernel(
    logits_ptr,  # (S, V)
    keys_ptr,  # (S, 2) int32, contiguous
    least_ptr,  # (S,)
    tokens_ptr, log_probs_ptr,  # (S,)
    row_stride, n_cols,
    inverse_temperature,
    DRAWS: tl.constexpr, HAS_LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_key = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
    second_key = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    row_max = tl.full([], -3.0e38, tl.float32)  # finite: -inf minus it is not NaN
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.full([], 0, tl.int32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * row_stride + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x, 0))
        total = total * tl.exp2((row_max - new_max) * LOG2E) + tl.sum(tl.exp2((x - new_max) * LOG2E), 0)
        row_max = new_max
        noisy = x
        if DRAWS:
            scores = x * fp32(inverse_temperature)
            noisy = scores + _gumbel(cols, first_key, second_key)
            if HAS_LEAST:
                noisy = tl.where(scores < tl.load(least_ptr + row), float("-inf"), noisy)
        block_best, place = tl.max(noisy, 0, return_indices=True)
        best_token = tl.where(block_best > best, start + place, best_token)
        best = tl.maximum(best, block_best)
    chosen = tl.load(logits_ptr + row * row_stride + best_token).to(tl.float32)
    tl.store(tokens_ptr + row, best_token.to(tl.int64))
    tl.store(log_probs_ptr + row, chosen - row_max - tl.log2(total) * LN2)


@cached
def _launch(draws: bool, has_least: bool, chip: Chip) -> Launcher:
    block = SAMPLE_BLOCK if chip.arch != "cpu" else 64
    constants = {"DRAWS": draws, "HAS_LEAST": has_least, "BLOCK": block, **launch_options(block, chip)}
    return Launcher(_sample_kernel, constants)


def sample_tokens(
    logits: Tensor,  # (S, V)
    keys: Tensor,  # (S, 2) int32: random bits of each row
    *,
    temperature: float,
    least: Tensor | None = None,  # (S,) float32: tokens with logit * (1 / temperature) below it are not drawn
) -> tuple[Tensor, Tensor]:  # (S,) int64; (S,) float32
    """Draw a token from each row; temperature 0 takes the largest logit.

    Returns the tokens, and their log-probabilities in softmax(logits): NaN where a logit of the row is NaN or inf.
    Raises ValueError on mismatched shapes and dtypes. Not differentiable. Deterministic.
    """
    n_rows, n_cols = logits.shape
    if keys.shape != (n_rows, 2) or keys.dtype != torch.int32 or not n_cols:
        raise ValueError(
            f"sample_tokens: logits {tuple(logits.shape)}, keys {tuple(keys.shape)} {keys.dtype}: expected (S, V) with "
            "V at least 1, and (S, 2) torch.int32"
        )
    if least is not None and least.shape != (n_rows,):
        raise ValueError(f"sample_tokens: least is {tuple(least.shape)}: expected ({n_rows},)")
    if not runs_triton(logits):
        return sample_tokens_reference(logits, keys, temperature=temperature, least=least)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    if n_rows:
        draws = temperature > 0
        _launch(draws, draws and least is not None, chip_of(logits.device))(
            (n_rows, 1, 1),
            (logits, keys.contiguous(), log_probs if least is None else least.float(), tokens, log_probs),
            (logits.stride(0), n_cols),
            1.0 / temperature if draws else 1.0,
        )
    return tokens, log_probs
