"""The functions that mixers of hybrid models call, by the names that the packages give them, and ours in their place.

Each modelling file defines them. Where a package (causal-conv1d, flash-linear-attention, mamba-ssm) is installed,
transformers calls the package's function instead.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ligertune.patching.mixers import function_trials
from ligertune.patching.probe import Refusal

CONVOLUTION = "causal_conv1d"
EXCHANGE = ("transformers.", "kernels.")  # they wrap functions to exchange them
CONVOLUTION_OPTIONS = frozenset({"bias", "activation", "seq_idx"})
SCAN_OPTIONS = frozenset(
    {"D", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states", "z", "seq_idx", "cu_seqlens"}
)
RULE_OPTIONS = frozenset({"initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens", "chunk_size"})


@dataclass(frozen=True)
class MixerFunction:
    """A function of the packages."""

    op: str  # that computes it
    pattern: re.Pattern[str]  # of its names in modelling files
    inputs: int  # its tensors, which a forward may give by position or by name
    options: frozenset[str]  # its further arguments, which ours takes as those of the files do
    module: str | None  # of ours, below ops.recurrence; None: the file's own stays, which computes nothing
    trial: Callable[[Callable[..., Any]], Refusal | None]  # why another function computes something else, or None


# transformers' names are those of the packages with "torch_" before some and without "fused_"
FUNCTIONS = {
    "causal_conv1d_fn": MixerFunction(
        CONVOLUTION,
        re.compile(r"(torch_)?causal_conv1d_fn"),
        2,
        CONVOLUTION_OPTIONS,
        "package_functions",
        function_trials.try_convolution,
    ),
    "causal_conv1d_update": MixerFunction(
        CONVOLUTION,
        re.compile(r"(torch_)?causal_conv1d_update"),
        3,
        CONVOLUTION_OPTIONS,
        "package_functions",
        function_trials.try_next_convolution,
    ),
    "chunk_gated_delta_rule": MixerFunction(
        "gated_delta_rule",
        re.compile(r"(torch_)?chunk_gated_delta_rule"),
        5,
        RULE_OPTIONS,
        "package_functions",
        function_trials.try_delta_rule,
    ),
    "fused_recurrent_gated_delta_rule": MixerFunction(
        "gated_delta_rule",
        re.compile(r"(torch_|fused_)?recurrent_gated_delta_rule"),
        5,
        RULE_OPTIONS,
        "package_functions",
        function_trials.try_delta_rule,
    ),
    "chunk_kda": MixerFunction(
        "kda",
        re.compile(r"chunk_(kimi_delta_attention|kda)"),
        5,
        RULE_OPTIONS,
        "kda.kda_functions",
        function_trials.try_channel_delta_rule,
    ),
    "fused_recurrent_kda": MixerFunction(
        "kda",
        re.compile(r"recurrent_kimi_delta_attention|fused_recurrent_kda"),
        5,
        RULE_OPTIONS,
        "kda.kda_functions",
        function_trials.try_channel_delta_rule,
    ),
    "mamba_chunk_scan_combined": MixerFunction(
        "ssd",
        re.compile(r"mamba2_chunk_scan|mamba_chunk_scan_combined"),
        6,
        SCAN_OPTIONS,
        "ssd.mamba_functions",
        function_trials.try_ssd,
    ),
    "selective_state_update": MixerFunction(
        "ssd",
        re.compile(r"(mamba2_)?selective_state_update"),
        6,
        frozenset({"D", "z", "dt_bias", "dt_softplus"}),
        "ssd.mamba_functions",
        function_trials.try_ssd_step,
    ),
    # the whole mixer in one: it would go past adapters of the output projection, and past hooks
    "mamba_split_conv1d_scan_combined": MixerFunction(
        "ssd",
        re.compile(r"(mamba2|mamba)_split_conv1d_scan_combined"),
        7,
        frozenset(),
        None,
        function_trials.try_nothing,
    ),
}
OPS = tuple(dict.fromkeys(function.op for function in FUNCTIONS.values()))


def our_function(role: str) -> Callable[..., Any] | None:
    """Return our function of the packages' name; None where the file's own stays."""
    module = FUNCTIONS[role].module
    if module is None:
        return None
    found: Callable[..., Any] = getattr(importlib.import_module(f"ligertune_kernels.ops.recurrence.{module}"), role)
    return found


def torch_function(function: Any) -> Callable[..., Any]:
    """Return a modelling file's own function, behind the module or package's function that it became.

    Wrappers of other code stay: they may change the result.
    """
    if isinstance(function, nn.Module):
        function = function.forward
    return inspect.unwrap(function, stop=lambda wrapper: not _exchanges(wrapper))


def _exchanges(wrapper: Any) -> bool:
    """Return whether a wrapper comes from the code that exchanges functions; `__module__` names what it wraps."""
    return getattr(wrapper, "__globals__", {}).get("__name__", "").startswith(EXCHANGE)


def why_not_ours(function: Callable[..., Any], role: MixerFunction) -> Refusal | None:
    """Return why our function cannot take the place of a modelling file's own, or None."""
    options = list(inspect.signature(function).parameters.values())[role.inputs :]
    for option in options if role.module else ():
        if option.kind is not option.VAR_KEYWORD and option.name not in role.options:
            return Refusal(f"it takes {option.name}, which kernels do not have")
    return role.trial(function)
