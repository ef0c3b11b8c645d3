"""State space duality under the names and arguments of the package mamba-ssm.

transformers' Mamba 2 models call these three functions and take them from the package where it is installed. Documents
of a packed row come in the arguments of package_functions.py: seq_idx, cu_seqlens, cu_seq_lens_q or document_places;
PASSED_ON has no effect. A chunk's size is chosen by the op: chunk_size has no effect either. dt, A, D and the states
are computed in fp32, whatever the tensors' dtype.

An argument of the package that these kernels do not compute is a ValueError, unless it is None or False. Any other name
is a TypeError.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.norms.gated_rms_norm import gated_rms_norm
from ligertune_kernels.ops.recurrence.causal_conv1d import causal_conv1d
from ligertune_kernels.ops.recurrence.input_checks import check_given, check_tensors
from ligertune_kernels.ops.recurrence.package_functions import (
    DOCUMENTS,
    NEEDS_DOCUMENTS,
    PASSED_ON,
    OptionNames,
    activation_of_name,
    check_options,
    documents_of_options,
)
from ligertune_kernels.ops.recurrence.ssd.op import NO_LIMIT, ssd, ssd_with_states
from ligertune_kernels.ops.recurrence.ssd.ssd_decode import ssd_step

# of mamba-ssm 2
SCAN = OptionNames(PASSED_ON.union(DOCUMENTS, NEEDS_DOCUMENTS), frozenset({"return_varlen_states"}))
STATE_UPDATE = OptionNames(PASSED_ON, frozenset({"state_batch_indices"}).union(DOCUMENTS))


class ScanStates(NamedTuple):
    """The states that a call of a function gives and asks for."""

    function: str
    initial: torch.Tensor | None  # (B, H, P, N)
    returns_final: bool

    def scan(
        self, tensors: tuple[torch.Tensor | None, ...], documents: Documents | None, steps: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ssd of its tensors; raise ValueError for states of packed documents."""
        if self.initial is None and not self.returns_final:
            return ssd(*tensors, documents=documents, **steps), None
        if documents is not None:
            raise ValueError(
                f"{self.function}: packed documents start from zeros and leave no state; leave out initial_states and "
                "return_final_states, or pass use_cache=False to the model"
            )
        return ssd_with_states(*tensors, initial_state=self.initial, **steps)


def mamba_chunk_scan_combined(
    x: torch.Tensor,  # (B, T, H, P)
    dt: torch.Tensor,  # (B, T, H)
    A: torch.Tensor,  # (H,)
    B: torch.Tensor,  # (B, T, G, N)
    C: torch.Tensor,  # (B, T, G, N)
    chunk_size: int | None = None,
    D: torch.Tensor | None = None,  # (H,) or (H, P)
    z: torch.Tensor | None = None,  # (B, T, H, P)
    dt_bias: torch.Tensor | None = None,  # (H,)
    initial_states: torch.Tensor | None = None,  # (B, H, P, N)
    seq_idx: torch.Tensor | None = None,  # (1, T)
    cu_seqlens: torch.Tensor | None = None,  # (documents + 1,)
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # (B, T, H, P), (B, H, P, N) float32
    """Compute `ssd` within documents, as mamba_chunk_scan_combined of mamba-ssm.

    Raises ValueError for states of packed documents and for what these kernels do not compute, TypeError for unknown
    names.
    """
    options |= {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
    check_options("mamba_chunk_scan_combined", options, SCAN)
    documents = documents_of_options("mamba_chunk_scan_combined", x, 4, options)
    states = ScanStates("mamba_chunk_scan_combined", initial_states, return_final_states)
    steps = {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
    out, state = states.scan((x, dt, A, B, C, D, z, dt_bias), documents, steps)
    return (out, state) if return_final_states else out


def selective_state_update(
    state: torch.Tensor,  # (B, H, P, N), in place
    x: torch.Tensor,  # (B, H, P)
    dt: torch.Tensor,  # (B, H, P), one number for each head
    A: torch.Tensor,  # (H, P, N), likewise
    B: torch.Tensor,  # (B, G, N)
    C: torch.Tensor,  # (B, G, N)
    D: torch.Tensor | None = None,  # (H, P)
    z: torch.Tensor | None = None,  # (B, H, P)
    dt_bias: torch.Tensor | None = None,  # (H, P), one number for each head
    dt_softplus: bool = False,
    **options: Any,
) -> torch.Tensor:  # (B, H, P)
    """Compute `ssd_step`, as selective_state_update of mamba-ssm does for Mamba 2.

    dt, A and dt_bias are expanded from one number for each head, as transformers' models do. On a CPU their copies will
    do. Raises ValueError where they differ within a head, as those of Mamba 1 do, or may, and for what these kernels do
    not compute, TypeError for unknown names and for what is no tensor.
    """
    check_options("selective_state_update", options, STATE_UPDATE)
    if any(t is None for t in (state, x, dt, A, B, C)):
        check_given("selective_state_update", state=state, x=x, dt=dt, A=A, B=B, C=C)
    check_tensors("selective_state_update", state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    if state.ndim != 4 or x.shape != state.shape[:3]:
        raise ValueError(
            f"selective_state_update: state {tuple(state.shape)} and x {tuple(x.shape)}; expected (B, H, P, N) and "
            "(B, H, P)"
        )
    heads, head_dim, state_dim = state.shape[1:]
    dt = _one_of_a_head("dt", dt, (x.shape[0], heads), (head_dim,))
    A = _one_of_a_head("A", A, (heads,), (head_dim, state_dim))
    if dt_bias is not None:
        dt_bias = _one_of_a_head("dt_bias", dt_bias, (heads,), (head_dim,))
    return ssd_step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus=dt_softplus)


def _one_of_a_head(name: str, t: torch.Tensor, of_heads: tuple[int, ...], of_columns: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers of heads from a tensor of heads and columns, whose columns repeat them.

    Values are read on a CPU alone, so that the host never waits for a GPU; elsewhere a stride of 0 tells.
    """
    if t.shape != (*of_heads, *of_columns):
        raise ValueError(f"selective_state_update: {name} is {tuple(t.shape)}; expected {(*of_heads, *of_columns)}")
    first = t[(..., *(0 for _ in of_columns))] if t.numel() else t.new_zeros(of_heads)
    sizes_and_strides = zip(of_columns, t.stride()[len(of_heads) :], strict=True)
    if all(stride == 0 or size <= 1 for size, stride in sizes_and_strides):
        return first
    # tensors of other classes, as those of torch.export, have no values
    is_read = not torch.compiler.is_compiling() and t.device.type == "cpu" and type(t) is torch.Tensor
    if not is_read or not torch.equal(t, first[(..., *(None for _ in of_columns))].expand(t.shape)):
        found = "differs within a head" if is_read else "may differ within a head"
        raise ValueError(
            f"selective_state_update: {name} {found}; these kernels take one number for each head, expanded to its "
            "columns without a copy (Mamba 2), not those of Mamba 1"
        )
    return first


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,  # (B, T, 2 H P + 2 G N + H)
    conv1d_weight: torch.Tensor,  # (H P + 2 G N, W)
    conv1d_bias: torch.Tensor | None,  # (H P + 2 G N,)
    dt_bias: torch.Tensor,  # (H,)
    A: torch.Tensor,  # (H,)
    D: torch.Tensor,  # (H,) or (H, P)
    chunk_size: int | None = None,
    initial_states: torch.Tensor | None = None,  # (B, H, P, N)
    seq_idx: torch.Tensor | None = None,  # (1, T)
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: torch.Tensor | None = None,  # (H P,)
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,  # (E, H P)
    outproj_bias: torch.Tensor | None = None,  # (E,)
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # (B, T, H P) or (B, T, E); (B, H, P, N) float32
    """Compute a Mamba 2 mixer from its projection on: convolution, `ssd`, gated norm and output projection.

    As mamba_split_conv1d_scan_combined of mamba-ssm, composed of the ops: the norm's groups are those of B and C, and
    without a norm z gates the outputs. Raises what mamba_chunk_scan_combined raises.
    """
    options["seq_idx"] = seq_idx
    name = "mamba_split_conv1d_scan_combined"
    check_options(name, options, SCAN)
    if any(t is None for t in (zxbcdt, conv1d_weight, dt_bias, A, D)):
        check_given(name, zxbcdt=zxbcdt, conv1d_weight=conv1d_weight, dt_bias=dt_bias, A=A, D=D)
    check_tensors(name, zxbcdt=zxbcdt, D=D)
    inner, state_cols = _widths(name, zxbcdt, D, headdim, ngroups)
    documents = documents_of_options(name, zxbcdt[..., None], 4, options)
    heads = D.shape[0]
    z, xbc, dt = zxbcdt.split((inner, inner + 2 * state_cols, heads), -1)
    xbc = causal_conv1d(
        xbc.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation_of_name(activation), documents=documents
    )
    x, B, C = xbc.transpose(1, 2).split((inner, state_cols, state_cols), -1)
    gate = z.unflatten(-1, (heads, -1)) if rmsnorm_weight is None else None
    B, C = (t.unflatten(-1, (ngroups, -1)) for t in (B, C))
    tensors = (x.unflatten(-1, (heads, -1)), dt, A, B, C, D, gate, dt_bias)
    states = ScanStates(name, initial_states, return_final_states)
    out, state = states.scan(tensors, documents, {"dt_softplus": True, "dt_limit": dt_limit})
    out = out.flatten(-2)
    if rmsnorm_weight is not None:
        out = gated_rms_norm(
            out, z, rmsnorm_weight, rmsnorm_eps, group_size=inner // ngroups, norm_before_gate=norm_before_gate,
            cast="gemma",  # as mamba-ssm, which rounds once
        )  # fmt: skip
    if outproj_weight is not None:
        out = F.linear(out.to(outproj_weight.dtype), outproj_weight, outproj_bias)
    return (out, state) if return_final_states else out


def _widths(name: str, zxbcdt: torch.Tensor, D: torch.Tensor, headdim: int | None, ngroups: int) -> tuple[int, int]:
    """Return the columns of all heads, and those of B, in a projection. Raises ValueError if they do not add up."""
    if D.ndim not in (1, 2) or (D.ndim == 1 and headdim is None):
        raise ValueError(f"{name}: D is {tuple(D.shape)} and headdim {headdim}; expected (H,) and a width, or (H, P)")
    heads = D.shape[0]
    inner = heads * (headdim if D.ndim == 1 else D.shape[1])
    rest = zxbcdt.shape[-1] - 2 * inner - heads
    if zxbcdt.ndim != 3 or ngroups < 1 or rest <= 0 or rest % (2 * ngroups):
        raise ValueError(
            f"{name}: zxbcdt is {tuple(zxbcdt.shape)}, with {heads} heads, {inner} columns of heads and {ngroups} "
            "groups; expected (B, T, 2 H P + 2 G N + H)"
        )
    return inner, rest // 2
