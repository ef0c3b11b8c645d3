"""What the gated delta rule and Kimi's delta attention share: inputs, the frame of references, and calls of the ops.

Shapes: B rows of T tokens; H heads of keys and X of values, K and V wide; N chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ligertune_kernels.autograd import autocast, without_autocast
from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence.input_checks import check_documents, check_rule
from ligertune_kernels.ops.recurrence.tiles import PART

EPS = 1e-6  # of the norm of q and k


class DeltaShape(NamedTuple):
    """Key of the launches."""

    heads: int  # H
    group: int  # X / H
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    l2_norm: bool
    has_documents: bool = False
    has_initial: bool = False
    has_final: bool = False  # forward: the final state is asked for; backward: it has a gradient

    @staticmethod
    def of(key: torch.Tensor, value: torch.Tensor, l2_norm: bool) -> DeltaShape:
        """Return the shape of a call without documents and states."""
        heads, key_dim = key.shape[2:]
        value_heads, value_dim = value.shape[2:]
        return DeltaShape(heads, value_heads // heads, key_dim, value_dim, key.dtype, l2_norm)

    def part(self, n_tokens: int) -> int:
        """Return the tokens of a part of a row, in which a program of a scan looks for its documents."""
        return min(PART, n_tokens) if self.has_documents else n_tokens


class DeltaInputs(NamedTuple):
    """What autograd keeps."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def of(*tensors: torch.Tensor | None) -> DeltaInputs:
        """Return the inputs. Where one of the last three is None, no kernel reads it, and beta takes its place."""
        return DeltaInputs(*(tensors[4] if t is None else t for t in tensors))

    def strides(self, *names: str) -> tuple[int, ...]:
        """Return strides of rows, tokens and heads, which Triton specialises on."""
        return tuple(stride for name in names for stride in getattr(self, name).stride()[:3])


# ---- references


class ChunkedInputs(NamedTuple):
    """Inputs of a reference in chunks, in fp32 or wider."""

    q: torch.Tensor  # (B, X, N, C, K), scaled
    k: torch.Tensor  # (B, X, N, C, K)
    v: torch.Tensor  # (B, X, N, C, V)
    decay: torch.Tensor  # (B, X, N, C), or (B, X, N, C, K)
    beta: torch.Tensor  # (B, X, N, C)
    seen: torch.Tensor  # (N, C, C) bool: an earlier token of the document, or itself
    reads_state: torch.Tensor  # (N, C) bool: its document began before the chunk
    n_tokens: int
    dtype: torch.dtype  # of the results


class ChunkTerms(NamedTuple):
    """What the decays of a rule make of the inputs, by chunk. Names and formulas: the ops' modules."""

    products: torch.Tensor  # (B, X, N, C, C): A, without beta
    weights: torch.Tensor  # (B, X, N, C, C): of v̂ of earlier tokens in the outputs
    read: torch.Tensor  # (B, X, N, C, K): m q
    erased: torch.Tensor  # (B, X, N, C, K): m k
    written: torch.Tensor  # (B, X, N, C, K): r k
    kept: torch.Tensor  # (B, X, N, 1 or K, 1): s


def chunked_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    l2_norm: bool,
    documents: Documents | None,
    chunk: int,
) -> ChunkedInputs:
    """Return a rule's inputs in chunks of so many tokens. Tokens that fill the last chunk change nothing."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = value.shape[2] // key.shape[2]
    n_tokens = query.shape[1]
    q, k = (t.to(wide).repeat_interleave(group, 2) for t in (query, key))
    if l2_norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
    q = q * query.shape[-1] ** -0.5
    starts = torch.zeros(n_tokens, dtype=torch.int32, device=query.device) if documents is None else documents.starts
    missing = -n_tokens % chunk
    if missing:
        starts = torch.cat((starts, starts[-1:].expand(missing)))
    starts = starts.view(-1, chunk)
    firsts = torch.arange(len(starts), device=query.device) * chunk
    return ChunkedInputs(
        *(_in_chunks(t.to(wide), missing, chunk) for t in (q, k, value, decay, beta)),
        seen=(starts[:, :, None] == starts[:, None, :]).tril(),
        reads_state=starts < firsts.clamp(min=1)[:, None],
        n_tokens=n_tokens,
        dtype=query.dtype,
    )


def _in_chunks(t: torch.Tensor, missing: int, chunk: int) -> torch.Tensor:
    """(B, T, X, ...) -> (B, X, N, C, ...), with zeros for the missing tokens."""
    if missing:
        t = torch.cat((t, t.new_zeros(t.shape[0], missing, *t.shape[2:])), 1)
    return t.unflatten(1, (-1, chunk)).movedim(3, 1)


def scan_chunks(
    x: ChunkedInputs, terms: ChunkTerms, initial_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs (B, T, X, V) in the inputs' dtype, and the state (B, X, K, V) after the last token."""
    beta = x.beta[..., None]
    identity = torch.eye(x.beta.shape[-1], dtype=x.q.dtype, device=x.q.device)
    system = (beta * terms.products).tril(-1) + identity
    u, w = (
        torch.linalg.solve_triangular(system, beta * t, upper=False, unitriangular=True) for t in (x.v, terms.erased)
    )
    batch, heads, n_chunks, _, key_dim = x.k.shape
    value_dim = x.v.shape[-1]
    state = u.new_zeros(batch, heads, key_dim, value_dim) if initial_state is None else initial_state.to(u.dtype)
    out = []
    for i in range(n_chunks):
        corrected = u[:, :, i] - w[:, :, i] @ state
        out.append(terms.read[:, :, i] @ state + terms.weights[:, :, i] @ corrected)
        state = terms.kept[:, :, i] * state + terms.written[:, :, i].mT @ corrected
    joined = torch.cat(out, 2)[:, :, : x.n_tokens].transpose(1, 2)
    return joined.to(x.dtype).contiguous(), state


# ---- calls


class DeltaRule(NamedTuple):
    """A rule as an op."""

    name: str
    function: type[torch.autograd.Function]
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    runs_kernels: Callable[[torch.Tensor, int], bool]  # for queries, and the widest head
    decays_of_channels: bool = False

    def of_rows(self, *tensors: torch.Tensor, l2_norm: bool, documents: Documents | None) -> torch.Tensor:
        """Return the outputs for query, key, value, decay and beta, from states of zeros."""
        check_rule(self.name, *tensors, decays_of_channels=self.decays_of_channels)
        query, key, value, decay, beta = tensors
        check_documents(self.name, documents, value)
        if value.numel() == 0:
            return value * _zero(query, key, decay, beta).to(value.dtype)
        inputs = *autocast(query, key, value), decay, beta
        if not self._runs_kernels(*inputs):
            with without_autocast(query.device):
                return self.reference(*inputs, l2_norm=l2_norm, documents=documents)[0]
        shape = DeltaShape.of(*inputs[1:3], l2_norm)._replace(has_documents=documents is not None)
        starts, ends = (None, None) if documents is None else (places.contiguous() for places in documents[:2])
        out, _ = self.function.apply(shape, *self._laid_out(*inputs), None, starts, ends)
        return out

    def with_states(
        self, *tensors: torch.Tensor, l2_norm: bool, initial_state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs for query, key, value, decay and beta, and the last states, from initial ones."""
        check_rule(self.name, *tensors, initial_state, decays_of_channels=self.decays_of_channels)
        query, key, value, decay, beta = tensors
        if value.numel() == 0:
            return self._of_no_tokens(*tensors, initial_state)
        inputs = *autocast(query, key, value), decay, beta
        if not self._runs_kernels(*inputs):
            with without_autocast(query.device):
                return self.reference(*inputs, l2_norm=l2_norm, initial_state=initial_state)
        shape = DeltaShape.of(*inputs[1:3], l2_norm)._replace(has_initial=initial_state is not None, has_final=True)
        initial = None if initial_state is None else initial_state.mT.contiguous()
        out, final_state = self.function.apply(shape, *self._laid_out(*inputs), initial, None, None)
        return out, final_state.mT.contiguous()

    def _runs_kernels(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: torch.Tensor) -> bool:
        return self.runs_kernels(query, max(key.shape[-1], value.shape[-1]))

    def _laid_out(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the inputs as kernels read them: with unit column stride, numbers per head contiguous."""
        n_rows = 4 if self.decays_of_channels else 3
        rows = (t if t.stride(-1) == 1 else t.contiguous() for t in tensors[:n_rows])
        return *rows, *(t.contiguous() for t in tensors[n_rows:])

    @staticmethod
    def _of_no_tokens(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        zero = _zero(query, key, value, decay, beta)
        dtype = torch.promote_types(value.dtype, torch.float32)
        shape = (value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
        state = value.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
        return value * zero.to(value.dtype), state + zero.to(dtype)


def _zero(*tensors: torch.Tensor) -> torch.Tensor:
    """Return 0, the sum of tensors without elements, with gradients for all of them."""
    return sum(t.sum() for t in tensors)
