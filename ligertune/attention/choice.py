"""Choose the attention implementation of a run from a table of those that isolate packed documents."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from ligertune_kernels import backend
from transformers import PreTrainedConfig

from ligertune.attention import flash_4
from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.models.read_config import RECURRENT_LAYERS, config_value, unknown_layers
from ligertune.models.score_head import SCORE_AUTO_CLASS, gives_scores
from ligertune.planning.memory.layer_bytes import FA4_OR_DOCUMENT_ATTENTION
from ligertune.planning.precision import Precision

DOCUMENT_ATTENTION = "document_attention"  # kernels.attention chooses it
FLASH_4 = "flash_attention_4"  # `auto` may choose it with kernels.attention: auto
# Chips on which it takes less time than torch's attention in each row of
# `scripts/bench kernels --only document_attention`.
FASTER_ON = ("sm90",)
VENDORS = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs", "cpu": "CPUs"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # rotary embeddings that depend on the highest position of a row


@dataclass(frozen=True)
class Attention:
    """One implementation. name: the recipe's. packed: transformers' name of it for packed rows."""

    name: str
    packed: str
    auto_on: tuple[str, ...]  # vendors on which `auto` may choose it; the first row that fits is chosen
    runs_on: tuple[str, ...]
    half_only: bool = False  # bfloat16 and float16
    soft_cap: bool = True
    dropout: bool = True
    package: str | None = None  # name of the distribution
    oldest_nvidia: int = 0  # compute capability, 80 for 8.0
    head_widths: tuple[int, ...] = ()  # the only ones, if any
    narrowest_head: int = 1
    widest_head: int = 1 << 30
    context_parallel_on: tuple[str, ...] = ()  # vendors on which it takes more keys than queries without a mask
    flag: str | None = None  # the attribute of transformers' model classes that says they support it
    one_launch: bool = False  # for all documents of a row
    multiple_of: int = 16  # tokens of a batch: matmuls gain 2 % tokens/s on an H100, padding included


# FlashAttention, in torch (varlen) and in flash-attn, needs sm80 and takes heads of at most 256 columns. On wider heads
# document_attention would run its reference, which stores the scores. torch's flex kernel refuses heads below 16.
ATTENTIONS = (
    Attention(FLASH_4, FA4_OR_DOCUMENT_ATTENTION, auto_on=("nvidia",), runs_on=("nvidia",), half_only=True,
              soft_cap=False, dropout=False, package=flash_4.PACKAGE, oldest_nvidia=90,
              head_widths=tuple(flash_4.LONG), one_launch=True),
    Attention(DOCUMENT_ATTENTION, DOCUMENT_ATTENTION, auto_on=("nvidia",), runs_on=("nvidia", "amd", "cpu"),
              dropout=False, oldest_nvidia=80, widest_head=256, one_launch=True),
    Attention("varlen", "varlen", auto_on=("nvidia",), runs_on=("nvidia",), half_only=True, soft_cap=False,
              dropout=False, oldest_nvidia=80, widest_head=256, context_parallel_on=("nvidia",), one_launch=True),
    Attention("flash_attention_2", "flash_attention_2", auto_on=("nvidia", "amd"), runs_on=("nvidia", "amd"),
              half_only=True, package="flash-attn", oldest_nvidia=80, widest_head=256, one_launch=True),
    Attention("flex_attention", "flex_attention", auto_on=("nvidia",), runs_on=("nvidia", "amd"), dropout=False,
              narrowest_head=16, flag="_supports_flex_attn",
              multiple_of=128),  # its block size; fewer lengths to compile for
    Attention("sdpa", "per_document", auto_on=("nvidia", "amd", "cpu"), runs_on=("nvidia", "amd", "cpu"),
              context_parallel_on=("cpu",)),
    Attention("eager", "eager", auto_on=(), runs_on=("nvidia", "amd", "cpu")),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionChoice:
    """implementation: the name that the model is built with; None lets transformers choose."""

    implementation: str | None
    why: str
    multiple_of: int = Attention.multiple_of
    one_launch: bool = False


@dataclass(frozen=True)
class AttentionDemands:
    """Settings of a run that limit which attention it can use.

    wanted: `model.attn_implementation`. packing: a row holds several documents. cp_size: ranks that share each row.
    own_kernel: `kernels.attention`, True to choose our kernel, "auto" to allow it and what is faster. deterministic:
    the same inputs must give the same bits. few_shapes: steps run as graphs. why_not_packed: why
    documents of a row would influence each other in this model.
    """

    wanted: str
    packing: bool
    cp_size: int = 1
    own_kernel: Literal["auto"] | bool = False
    deterministic: bool = True
    few_shapes: bool = False
    why_not_packed: str | None = None


def choose_attention(
    demands: AttentionDemands, config: PreTrainedConfig, machine: Machine, precision: Precision
) -> AttentionChoice:
    """Choose the attention of a model. Raises UserError if none fits or packing is impossible."""
    packing = demands.packing
    own_kernel = demands.own_kernel
    cp_size = demands.cp_size
    wanted = DOCUMENT_ATTENTION if own_kernel is True else demands.wanted
    if cp_size > 1:
        check_shared_rows(config)
    if packing:
        check_layers(config, demands.why_not_packed)
    elif wanted == "auto":
        return AttentionChoice(None, "")
    reasons = {row.name: _refusal(row, config, machine, precision, cp_size) for row in ATTENTIONS}
    unwanted = _against_flash_4(demands)
    if wanted != "auto":
        reason = reasons[wanted] or (unwanted if wanted == FLASH_4 else None)
        return _explicit_choice(wanted, reason, packing=packing)
    fast = machine.arch in FASTER_ON and precision.half and not _lacks_triton()
    left_out = set() if own_kernel == "auto" and fast else {DOCUMENT_ATTENTION, FLASH_4}
    left_out |= {FLASH_4} if unwanted else set()
    rows = [row for row in ATTENTIONS if row.name not in left_out and machine.vendor in row.auto_on]
    return _first_fitting(rows, reasons)


def _against_flash_4(demands: AttentionDemands) -> str | None:
    """Return which setting of the run excludes FlashAttention-4, or None."""
    if demands.deterministic:
        return "its gradients differ from run to run, and train.full_determinism is true"
    return "train.torch_compile and train.cuda_graphs do not run it" if demands.few_shapes else None


def _explicit_choice(wanted: str, reason: str | None, *, packing: bool) -> AttentionChoice:
    """Return the attention that the recipe names. reason: why it cannot be used."""
    if reason is not None and wanted == DOCUMENT_ATTENTION:
        raise UserError(f"kernels.attention cannot be used: {reason}.", hint="Leave it out.")
    if reason is not None:
        raise UserError(
            f"model.attn_implementation: {wanted} cannot be used: {reason}.",
            hint="Write auto, which takes an exact one that fits.",
        )
    row = next(row for row in ATTENTIONS if row.name == wanted)
    name = row.packed if packing else row.name
    return AttentionChoice(name, "", row.multiple_of, row.one_launch)


def _first_fitting(rows: list[Attention], reasons: dict[str, str | None]) -> AttentionChoice:
    refused = [f"{row.name}: {reasons[row.name]}" for row in rows if reasons[row.name] is not None]
    row = next((row for row in rows if reasons[row.name] is None), None)
    if row is None:
        raise UserError(
            f"parallel.cp_size: no attention here computes a part of a row ({'; '.join(refused)}).",
            hint="It takes varlen, on an NVIDIA GPU from sm80 on, with model.dtype: bfloat16.",
        )
    passed_over = [f"{row.name}: {reasons[row.name]}" for row in rows[: rows.index(row)]]
    return AttentionChoice(row.packed, "; ".join(["documents isolated", *passed_over]), row.multiple_of, row.one_launch)


def _lacks_triton() -> bool:
    """Return whether our kernels would run their reference on this GPU, which stores the scores of whole documents."""
    return torch.cuda.is_available() and backend("cuda") == "reference"


def check_layers(config: PreTrainedConfig, why_not_packed: str | None = None) -> None:
    """Raise UserError if documents of a packed row would, or may, influence each other in this model."""
    unknown = ", ".join(unknown_layers(config))
    if unknown and why_not_packed is None:
        why_not_packed = f"{config.model_type} has {unknown} layers, which may see from one document into the next"
    if why_not_packed is not None:
        raise UserError(f"data.packing: {why_not_packed}.", hint="Write data.packing: false.")


def check_shared_rows(config: PreTrainedConfig) -> None:
    """Raise UserError if a part of a row would not be computed as it is within the whole row."""
    if set(getattr(config.get_text_config(), "layer_types", None) or ()) & RECURRENT_LAYERS:
        raise UserError(
            f"parallel.cp_size: recurrences of {config.model_type} carry their state through a row from its first "
            "token to its last, so the ranks that share one would wait for each other.",
            hint="Leave it out.",
        )
    found = _length_dependent_rope(config)
    if found:
        raise UserError(
            f"parallel.cp_size: the rotary angles of {config.model_type} ({', '.join(found)}) "
            "depend on how long a row is, and a rank knows only its part.",
            hint="Leave it out.",
        )
    modality_of(config).check_shared_rows()


def _length_dependent_rope(config: PreTrainedConfig) -> dict[str, int]:
    """Return kinds of rotary embeddings that depend on the highest position of a row -> where they change."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    found = {}
    # rope_parameters are one dictionary, or one per layer type
    for each in (rope, *rope.values()):
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind in LENGTH_DEPENDENT_ROPE:
            own = each.get("original_max_position_embeddings") if kind == "longrope" else None
            found[kind] = own or text.max_position_embeddings
    return found


def why_documents_of_a_row_matter(config: PreTrainedConfig, max_length: int) -> str | None:
    """Return why a long document of a row would change the rotary angles of the others, or None."""
    for kind, length in _length_dependent_rope(config).items():
        if max_length > length:
            return (
                f"the rotary angles of {config.model_type} ({kind}) change in the whole row if one of its documents "
                f"has more than {length} tokens, which data.max_length: {max_length} allows"
            )
    return None


def missing_here(row: Attention, machine: Machine) -> str | None:
    """Return why an attention cannot be used on this machine with any model, or None."""
    capability = int(machine.arch[2:]) if machine.vendor == "nvidia" else 0
    if machine.vendor not in row.runs_on:
        return f"it trains on {' and '.join(VENDORS[vendor] for vendor in row.runs_on)} only"
    if machine.vendor == "nvidia" and capability < row.oldest_nvidia:
        return f"{machine.name} ({machine.arch}) is older than sm{row.oldest_nvidia}"
    if row.package and not installed(row.package):
        return f"the package {row.package} is not installed"
    return None


def installed(package: str) -> bool:
    """Find a distribution: flash-attn and flash-attn-4 both have modules in flash_attn."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _model_class(config: PreTrainedConfig) -> type | None:
    """Return the model class of a configuration; None if its code is in the model's own repository."""
    of_texts = getattr(transformers, modality_of(config).auto_class)
    auto_class: Any = SCORE_AUTO_CLASS if gives_scores(config) else of_texts
    return auto_class._model_mapping.get(type(config), None)


def _refusal(
    row: Attention, config: PreTrainedConfig, machine: Machine, precision: Precision, cp_size: int
) -> str | None:
    """Return why an attention cannot be used for this model on this machine, or None."""
    if (missing := missing_here(row, machine)) is not None:
        return missing
    if cp_size > 1 and machine.vendor not in row.context_parallel_on:
        return f"it attends to whole rows on {VENDORS[machine.vendor]}, and parallel.cp_size cuts them"
    text = config.get_text_config()
    head_dim = max(config_value(text, name, 0) for name in ("head_dim", "qk_head_dim"))
    # a model without attention (RWKV) has no heads, and none of these kernels runs in it: any width will do
    head_dim = head_dim or config_value(text, "hidden_size", 1) // config_value(text, "num_attention_heads", 1)
    soft_cap = config_value(text, "attn_logit_softcapping")
    dropout = config_value(text, "attention_dropout", 0.0)
    model = _model_class(config) if row.flag is not None else None
    reasons = (
        (row.half_only and not precision.half, "it computes in bfloat16 or float16 only"),
        (soft_cap is not None and not row.soft_cap,
         f"it has no soft cap, and the model caps its attention scores at {soft_cap or 0:g}"),
        (dropout and not row.dropout, f"it has no dropout, and the model's attention_dropout is {dropout or 0:g}"),
        (model is not None and not getattr(model, row.flag or "", True),
         f"transformers does not offer it for {getattr(model, '__name__', None)}"),
        (row.head_widths and head_dim not in row.head_widths,
         f"its heads are {' or '.join(map(str, row.head_widths))} wide, and the model's are {head_dim}"),
        (head_dim < row.narrowest_head,
         f"its heads are at least {row.narrowest_head} wide, and the model's are {head_dim}"),
        (head_dim > row.widest_head, f"its heads are at most {row.widest_head} wide, and the model's are {head_dim}"),
    )  # fmt: skip
    return next((reason for refused, reason in reasons if refused), None)
