"""The ops under the names and arguments of the packages causal-conv1d and flash-linear-attention.

transformers' hybrid models call these four functions and take them from a package where it is installed. Documents of a
packed row come in the packages' own arguments, or as `document_places`, which needs no search for them:

    seq_idx           (1, T): a number for each token, which changes with each document
    cu_seqlens        (documents + 1,): the places where documents begin, then the number of tokens
    cu_seq_lens_q     as cu_seqlens, under transformers' name
    document_places   (2, T) int32: the first token, and the one after the last, of each token's document

Tokens that no document of cu_seqlens has are a document of their own. The two functions of the rule take by name:

    initial_state             (B, X, K, V)
    output_final_state        bool
    use_qk_l2norm_in_kernel   bool
    scale                     factor of the outputs, by default 1 / sqrt(K)

Arguments of the packages that would change the result are refused. Others, and what transformers passes on to all
layers, have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence import decode
from ligertune_kernels.ops.recurrence.causal_conv1d import Activation, causal_conv1d
from ligertune_kernels.ops.recurrence.gated_delta_rule import gated_delta_rule, gated_delta_rule_with_states

DOCUMENTS = ("document_places", "cu_seqlens", "cu_seq_lens_q", "seq_idx")  # the first that is given counts
# of causal-conv1d 1.6 and flash-linear-attention 0.6
OTHER_RESULTS = frozenset({
    "initial_states", "return_final_states", "final_states_out", "cache_seqlens", "conv_state_indices",
    "head_first", "use_gate_in_kernel", "A_log", "dt_bias", "safe_gate", "lower_bound", "allow_neg_eigval",
    "use_beta_sigmoid_in_kernel", "transpose_state_layout", "state_v_first", "cp_context", "gk", "gv", "g_gamma",
})  # fmt: skip
ACTIVATIONS: dict[str | None, Activation | None] = {None: None, "silu": "silu", "swish": "silu"}


def causal_conv1d_fn(
    x: torch.Tensor,  # (B, C, T)
    weight: torch.Tensor,  # (C, W)
    bias: torch.Tensor | None = None,  # (C,)
    seq_idx: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:  # (B, C, T)
    """Convolve within documents, as causal_conv1d_fn of causal-conv1d.

    Raises ValueError for other activations and for arguments that change the result otherwise.
    """
    _check("causal_conv1d_fn", options)
    documents = _documents(x.shape[-1], {**options, "seq_idx": seq_idx})
    return causal_conv1d(x, weight, bias, activation=_activation(activation), documents=documents)


def causal_conv1d_update(
    x: torch.Tensor,  # (B, C) or (B, C, L)
    conv_state: torch.Tensor,  # (B, C, S), in place
    weight: torch.Tensor,  # (C, W)
    bias: torch.Tensor | None = None,  # (C,)
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:  # as x
    """Convolve the next tokens, as causal_conv1d_update of causal-conv1d. Raises ValueError as causal_conv1d_fn."""
    _check("causal_conv1d_update", options)
    tokens = x[..., None] if x.ndim == 2 else x
    y = decode.causal_conv1d_step(tokens, conv_state, weight, bias, activation=_activation(activation))
    return y[..., 0] if x.ndim == 2 else y


def chunk_gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X)
    beta: torch.Tensor,  # (B, T, X)
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule within documents, as chunk_gated_delta_rule of flash-linear-attention.

    Raises ValueError for states of packed documents and for arguments that change the result otherwise.
    """
    _check("chunk_gated_delta_rule", options)
    tensors = (query, key, value, g, beta)
    documents = _documents(query.shape[1], options)
    l2_norm = options.get("use_qk_l2norm_in_kernel", False)
    initial_state = options.get("initial_state")
    if initial_state is None and not options.get("output_final_state"):
        return _scaled(gated_delta_rule(*tensors, l2_norm=l2_norm, documents=documents), key, options), None
    if documents is not None:
        raise ValueError(
            "gated_delta_rule: packed documents start from zeros and leave no state; leave out initial_state and "
            "output_final_state, or pass use_cache=False to the model"
        )
    out, state = gated_delta_rule_with_states(*tensors, l2_norm=l2_norm, initial_state=initial_state)
    return _scaled(out, key, options), state if options.get("output_final_state") else None


def fused_recurrent_gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X)
    beta: torch.Tensor,  # (B, T, X)
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule of few tokens, as fused_recurrent_gated_delta_rule of flash-linear-attention.

    With gradients or documents, chunks compute the same. Raises ValueError as chunk_gated_delta_rule.
    """
    _check("fused_recurrent_gated_delta_rule", options)
    tensors = (query, key, value, g, beta)
    states = options.get("initial_state")
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, states))
    if needs_grad or any(options.get(name) is not None for name in DOCUMENTS):
        return chunk_gated_delta_rule(*tensors, **options)
    out, state = decode.gated_delta_rule_step(
        *tensors, l2_norm=options.get("use_qk_l2norm_in_kernel", False), initial_state=options.get("initial_state")
    )
    return _scaled(out, key, options), state if options.get("output_final_state") else None


def _scaled(out: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return outputs, which have the factor 1 / sqrt(K), with that of the options."""
    scale = options.get("scale")
    return out if scale is None else out * (scale * key.shape[-1] ** 0.5)


def _activation(name: str | None) -> Activation | None:
    if name not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation is {name!r}; expected silu, swish or None")
    return ACTIVATIONS[name]


def _check(function: str, options: dict[str, Any]) -> None:
    for name in OTHER_RESULTS & options.keys():
        value = options[name]
        if value is not None and value is not False:
            raise ValueError(f"{function}: {name} is given, which these kernels do not compute; leave it out")


def _documents(n_tokens: int, options: dict[str, Any]) -> Documents | None:
    """Return the documents of a packed row by whichever argument tells of them; None without any.

    Nothing waits for the device: the number of documents is not read. Raises ValueError on other shapes and dtypes.
    """
    given = ((name, options[name]) for name in DOCUMENTS if options.get(name) is not None)
    name, tensor = next(given, (None, None))
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; expected a tensor")
    shape = {"document_places": (2, n_tokens), "seq_idx": (1, n_tokens)}.get(name)
    no_number = tensor.is_floating_point() or tensor.dtype is torch.bool
    if no_number or (tensor.ndim != 1 if shape is None else tensor.shape != shape):
        expected = "(documents + 1,)" if shape is None else shape
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; expected integers {expected} for one row of "
            f"{n_tokens} tokens"
        )
    if name == "document_places":
        return Documents(*tensor.int())
    return _numbered_documents(tensor[0]) if name == "seq_idx" else _bounded_documents(tensor, n_tokens)


def _numbered_documents(numbers: torch.Tensor) -> Documents:
    n_tokens = len(numbers)
    tokens = torch.arange(n_tokens, dtype=torch.int32, device=numbers.device)
    changes = numbers[1:] != numbers[:-1]
    starts = tokens.clone()
    starts[1:] *= changes
    ends = tokens + 1
    ends[:-1] = torch.where(changes, ends[:-1], n_tokens)
    return Documents(starts.cummax(0).values, ends.flip(0).cummin(0).values.flip(0))


def _bounded_documents(cu_seqlens: torch.Tensor, n_tokens: int) -> Documents:
    # 0 and n_tokens once more, so that every token has a bound on either side, whatever is given
    bounds = functional.pad(cu_seqlens.long().clamp(0, n_tokens), (1, 1))
    bounds[-1] = n_tokens
    tokens = torch.arange(n_tokens, dtype=bounds.dtype, device=bounds.device)
    after = torch.searchsorted(bounds, tokens, right=True)
    return Documents(bounds[after - 1].int(), bounds[after].int())
