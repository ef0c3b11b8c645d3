"""The ops under the names and arguments of the packages causal-conv1d and flash-linear-attention.

transformers' hybrid models call these four functions and take them from a package where it is installed. Documents of a
packed row come in the packages' own arguments, or as `document_places`, which needs no search for them:

    seq_idx           (1, T): a number for each token, which changes with each document
    cu_seqlens        (documents + 1,): 0, then the place after each document's last token
    cu_seq_lens_q     as cu_seqlens, under transformers' name
    document_places   (2, T) int32: the first token, and the one after the last, of each token's document

If several are given, the first of DOCUMENTS counts. Tokens after the last place of cu_seqlens are a document of their
own. Places of cu_seqlens that decrease, do not begin at 0 or lie beyond the row are a ValueError on the CPU. On a GPU
they are not read by the host, which would wait: there a place counts as the largest up to it, at most T, and tokens
before the first place are a document of their own. No access leaves the row.

The two functions of the rule take query, key and value as q, k and v, too, and by name:

    initial_state             (B, X, K, V)
    output_final_state        bool
    use_qk_l2norm_in_kernel   bool
    scale                     factor of the outputs, by default 1 / sqrt(K)

An argument of the packages that these kernels do not compute is a ValueError, unless it is None or False. What
transformers passes on to all layers (PASSED_ON) has no effect. Any other name is a TypeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.recurrence import decode
from ligertune_kernels.ops.recurrence.causal_conv1d import Activation, causal_conv1d
from ligertune_kernels.ops.recurrence.gated_delta_rule import gated_delta_rule, gated_delta_rule_with_states

DOCUMENTS = ("document_places", "cu_seqlens", "cu_seq_lens_q", "seq_idx")  # the first that is given counts
# transformers gives these to every layer of a model
PASSED_ON = frozenset({
    "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "cache_position", "num_items_in_batch",
    "use_cache", "output_hidden_states", "output_attentions", "output_router_logits", "is_causal",
})  # fmt: skip
# they repeat what another argument says of the documents, and say too little alone
NEEDS_DOCUMENTS = frozenset({"cu_seq_lens_k", "cu_seqlens_cpu", "chunk_indices"})
ACTIVATIONS: dict[str | None, Activation | None] = {None: None, "silu": "silu", "swish": "silu"}


class OptionNames(NamedTuple):
    """The names that a function takes besides its tensors."""

    taken: frozenset[str]  # they are read, or have no effect on the result
    refused: frozenset[str]  # the packages' functions have them, and compute something else


# of causal-conv1d 1.6 and flash-linear-attention 0.6
CONVOLUTION = OptionNames(
    PASSED_ON.union(DOCUMENTS), frozenset({"initial_states", "return_final_states", "final_states_out"})
)
NEXT_CONVOLUTION = OptionNames(PASSED_ON, frozenset({"cache_seqlens", "conv_state_indices"}).union(DOCUMENTS))
RULE = OptionNames(
    PASSED_ON.union(
        DOCUMENTS, NEEDS_DOCUMENTS,
        ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "scale", "chunk_size"),
    ),
    frozenset({
        "head_first", "use_gate_in_kernel", "A_log", "dt_bias", "safe_gate", "lower_bound", "allow_neg_eigval",
        "use_beta_sigmoid_in_kernel", "transpose_state_layout", "state_v_first", "cp_context", "gk", "gv", "g_gamma",
    }),
)  # fmt: skip
SHORT_NAMES = {"q": "query", "k": "key", "v": "value"}  # of flash-linear-attention


def accept_short_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function take query, key and value under flash-linear-attention's names, too."""

    @functools.wraps(function)
    def call(*tensors: torch.Tensor, **options: Any) -> Any:
        for short, name in SHORT_NAMES.items():
            if short not in options:
                continue
            if name in options:
                raise TypeError(f"{function.__name__}: {name} and {short} are one argument; give one of them")
            options[name] = options.pop(short)
        return function(*tensors, **options)

    return call


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

    Raises ValueError for other activations, and for what these kernels do not compute, TypeError for unknown names.
    """
    options["seq_idx"] = seq_idx
    check_options("causal_conv1d_fn", options, CONVOLUTION)
    documents = documents_of_options("causal_conv1d_fn", x, 3, options)
    return causal_conv1d(x, weight, bias, activation=activation_of_name(activation), documents=documents)


def causal_conv1d_update(
    x: torch.Tensor,  # (B, C) or (B, C, L)
    conv_state: torch.Tensor,  # (B, C, S), in place
    weight: torch.Tensor,  # (C, W)
    bias: torch.Tensor | None = None,  # (C,)
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:  # as x
    """Convolve the next tokens, as causal_conv1d_update of causal-conv1d. Raises what causal_conv1d_fn raises."""
    check_options("causal_conv1d_update", options, NEXT_CONVOLUTION)
    is_one_token = isinstance(x, torch.Tensor) and x.ndim == 2
    tokens = x[..., None] if is_one_token else x
    y = decode.causal_conv1d_step(tokens, conv_state, weight, bias, activation=activation_of_name(activation))
    return y[..., 0] if is_one_token else y


@accept_short_names
def chunk_gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X): the decay's logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule within documents, as chunk_gated_delta_rule of flash-linear-attention.

    Raises ValueError for states of packed documents and for what these kernels do not compute, TypeError for unknown
    names.
    """
    check_options("chunk_gated_delta_rule", options, RULE)
    tensors = (query, key, value, g, beta)
    documents = documents_of_options("chunk_gated_delta_rule", query, 4, options)
    l2_norm = bool(options.get("use_qk_l2norm_in_kernel"))
    initial_state = options.get("initial_state")
    if initial_state is None and not options.get("output_final_state"):
        return scaled(gated_delta_rule(*tensors, l2_norm=l2_norm, documents=documents), key, options), None
    if documents is not None:
        raise ValueError(
            "gated_delta_rule: packed documents start from zeros and leave no state; leave out initial_state and "
            "output_final_state, or pass use_cache=False to the model"
        )
    out, state = gated_delta_rule_with_states(*tensors, l2_norm=l2_norm, initial_state=initial_state)
    return scaled(out, key, options), state if options.get("output_final_state") else None


@accept_short_names
def fused_recurrent_gated_delta_rule(
    query: torch.Tensor,  # (B, T, H, K)
    key: torch.Tensor,  # (B, T, H, K)
    value: torch.Tensor,  # (B, T, X, V)
    g: torch.Tensor,  # (B, T, X): the decay's logarithms, at most 0
    beta: torch.Tensor,  # (B, T, X)
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # (B, T, X, V), (B, X, K, V) float32
    """Compute the gated delta rule of few tokens, as fused_recurrent_gated_delta_rule of flash-linear-attention.

    With gradients or documents, chunks compute the same. Raises what chunk_gated_delta_rule raises.
    """
    check_options("fused_recurrent_gated_delta_rule", options, RULE)
    tensors = (query, key, value, g, beta)
    states = options.get("initial_state")
    # an object that is no tensor is refused by the op
    needs_grad = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (*tensors, states))
    if needs_grad or any(options.get(name) is not None for name in DOCUMENTS):
        return chunk_gated_delta_rule(*tensors, **options)
    l2_norm = bool(options.get("use_qk_l2norm_in_kernel"))
    out, state = decode.gated_delta_rule_step(*tensors, l2_norm=l2_norm, initial_state=states)
    return scaled(out, key, options), state if options.get("output_final_state") else None


def scaled(out: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return outputs, which have the factor 1 / sqrt(K), with that of the options."""
    scale = options.get("scale")
    return out if scale is None else out * (scale * key.shape[-1] ** 0.5)


def activation_of_name(name: str | None) -> Activation | None:
    if name not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation is {name!r}; expected silu, swish or None")
    return ACTIVATIONS[name]


def check_options(function: str, options: dict[str, Any], names: OptionNames) -> None:
    """Raise TypeError for a name that is unknown, ValueError for a value that the kernels cannot honour."""
    for name, value in options.items():
        if name not in names.taken:
            if name not in names.refused:
                _refuse_name(function, name, names)
            if value is not None and value is not False:
                raise ValueError(f"{function}: {name} is given, which these kernels do not compute; leave it out")
        elif name == "is_causal" and value is False:
            raise ValueError(f"{function}: is_causal is False, but a token sees none after it; leave it out")
        elif name in NEEDS_DOCUMENTS and value is not None and all(options.get(n) is None for n in DOCUMENTS):
            raise ValueError(f"{function}: {name} is given without cu_seqlens, which names the documents; pass it, too")
    scale = options.get("scale")
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"{function}: scale is a {type(scale).__name__}; expected a number")


def _refuse_name(function: str, name: str, names: OptionNames) -> None:
    close = get_close_matches(name, sorted(names.taken | names.refused), n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else "leave it out"
    raise TypeError(f"{function}: unknown argument {name}; {hint}")


def documents_of_options(function: str, x: torch.Tensor, rank: int, options: dict[str, Any]) -> Documents | None:
    """Return the documents of a packed row by whichever argument tells of them; None without any.

    x: (B, C, T), of rank 3, or (B, T, H, K). Nothing waits for a GPU: values are read on the CPU alone. Raises
    TypeError for what is no tensor, ValueError for other shapes, dtypes and devices.
    """
    given = ((name, options[name]) for name in DOCUMENTS if options.get(name) is not None)
    name, tensor = next(given, (None, None))
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function}: {name} is a {type(tensor).__name__}; expected a tensor")
    if not isinstance(x, torch.Tensor) or x.ndim != rank:
        return None  # the op refuses x
    n_tokens = x.shape[-1] if rank == 3 else x.shape[1]
    _check_form(function, name, tensor, n_tokens)
    if tensor.device != x.device:
        raise ValueError(f"{function}: {name} is on {tensor.device} and the tokens on {x.device}; expected one device")
    if name == "document_places":
        return Documents(*tensor.int())
    if name == "seq_idx":
        return _numbered_documents(tensor[0])
    _check_bounds(function, name, tensor, n_tokens)
    return bounded_documents(tensor, n_tokens)


def _check_form(function: str, name: str, tensor: torch.Tensor, n_tokens: int) -> None:
    """Raise ValueError if a tensor of documents has another shape or is not one of integers."""
    shape = {"document_places": (2, n_tokens), "seq_idx": (1, n_tokens)}.get(name)
    fits = tensor.ndim == 1 and len(tensor) > 1 if shape is None else tensor.shape == shape
    no_integers = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
    if no_integers or not fits:
        expected = "(documents + 1,)" if shape is None else shape
        raise ValueError(
            f"{function}: {name} is {tuple(tensor.shape)} of {tensor.dtype}; expected integers {expected} for one row "
            f"of {n_tokens} tokens"
        )


def _check_bounds(function: str, name: str, cu_seqlens: torch.Tensor, n_tokens: int) -> None:
    """Raise ValueError if places are not in order or not of the row, where they can be read without waiting."""
    # tensors of other classes, as those of torch.export, have no values
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu" or type(cu_seqlens) is not torch.Tensor:
        return
    places = cu_seqlens.tolist()
    if places[0] != 0:
        raise ValueError(f"{function}: {name} begins at {places[0]}; expected 0")
    if places[-1] > n_tokens:
        raise ValueError(f"{function}: {name} ends at {places[-1]}, and the row has {n_tokens} tokens")
    if places != sorted(places):
        raise ValueError(f"{function}: {name} decreases; expected the places of documents in order")


def _numbered_documents(numbers: torch.Tensor) -> Documents:
    n_tokens = len(numbers)
    tokens = torch.arange(n_tokens, dtype=torch.int32, device=numbers.device)
    changes = numbers[1:] != numbers[:-1]
    starts = tokens.clone()
    starts[1:] *= changes
    ends = tokens + 1
    ends[:-1] = torch.where(changes, ends[:-1], n_tokens)
    return Documents(starts.cummax(0).values, ends.flip(0).cummin(0).values.flip(0))


def bounded_documents(cu_seqlens: torch.Tensor, n_tokens: int) -> Documents:
    """Return the documents between places, which are brought into order and into the row."""
    # 0 and n_tokens once more, so that every token has a bound on either side, whatever is given
    bounds = functional.pad(cu_seqlens.long().clamp(0, n_tokens).cummax(0).values, (1, 1))
    bounds[-1] = n_tokens
    tokens = torch.arange(n_tokens, dtype=bounds.dtype, device=bounds.device)
    after = torch.searchsorted(bounds, tokens, right=True)
    return Documents(bounds[after - 1].int(), bounds[after].int())
