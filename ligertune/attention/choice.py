"""Which attention a run uses, and why: a table of what can keep the documents of a packed row apart."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
from ligertune_kernels import backend
from transformers import PreTrainedConfig

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.models.load import model_class
from ligertune.planning.precision import Precision

OURS = "document_attention"  # chosen by kernels.attention
# Where it takes less time than torch's in each row of `scripts/bench_kernels --only document_attention`.
FASTER_ON = ("sm90",)
VENDORS = {"nvidia": "NVIDIA GPUs", "amd": "AMD GPUs", "cpu": "CPUs"}
# what a layer may be called for its state or its pattern to respect documents
BY_LENGTH = {"dynamic", "longrope"}  # kinds of rotary embedding that look at the highest position of a row
ISOLATED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Attention:
    """One way to attend. `name` is the recipe's, `packed` transformers' for packed rows."""

    name: str
    packed: str
    auto_on: tuple[str, ...]  # vendors on which `auto` takes it, the first row that fits
    runs_on: tuple[str, ...]
    half_only: bool = False  # bfloat16 and float16
    soft_cap: bool = True
    dropout: bool = True
    package: str | None = None
    oldest_nvidia: int = 0  # compute capability, 80 for 8.0
    narrowest_head: int = 1
    widest_head: int = 1 << 30
    parts_on: tuple[str, ...] = ()  # vendors on which its queries may have more keys than they are, with no mask
    flag: str | None = None  # of those of transformers' model classes that take it
    one_launch: bool = False  # for all documents of a row
    multiple_of: int = 16  # tokens of a batch: matrix products like it, 2 % more tokens/s on an H100, padding and all


ATTENTIONS = (
    Attention(OURS, OURS, auto_on=("nvidia",), runs_on=("nvidia", "amd", "cpu"), dropout=False,
              oldest_nvidia=80, widest_head=256, one_launch=True),
    Attention("varlen", "varlen", auto_on=("nvidia",), runs_on=("nvidia",), half_only=True, soft_cap=False,
              dropout=False, oldest_nvidia=80, widest_head=256, parts_on=("nvidia",), one_launch=True),
    Attention("flash_attention_2", "flash_attention_2", auto_on=("nvidia", "amd"), runs_on=("nvidia", "amd"),
              half_only=True, package="flash_attn", oldest_nvidia=80, widest_head=256, one_launch=True),
    Attention("flex_attention", "flex_attention", auto_on=("nvidia",), runs_on=("nvidia", "amd"), dropout=False,
              narrowest_head=16, flag="_supports_flex_attn",
              multiple_of=128),  # its blocks, and few lengths to compile for
    Attention("sdpa", "per_document", auto_on=("nvidia", "amd", "cpu"), runs_on=("nvidia", "amd", "cpu"),
              parts_on=("cpu",)),
    Attention("eager", "eager", auto_on=(), runs_on=("nvidia", "amd", "cpu")),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionChoice:
    """`implementation` is what the model is built with; None leaves it to transformers."""

    implementation: str | None
    why: str
    multiple_of: int = Attention.multiple_of
    one_launch: bool = False


def choose_attention(
    wanted: str,
    config: PreTrainedConfig,
    machine: Machine,
    precision: Precision,
    *,
    packing: bool,
    cp_size: int = 1,
    ours: Literal["auto"] | bool = False,
) -> AttentionChoice:
    """The attention for `model.attn_implementation`; a UserError where it cannot be, or cannot be packed.

    cp_size: ranks that share each row. ours: whether it is to be our own, or may be where the model's is auto.
    """
    wanted = OURS if ours is True else wanted
    if cp_size > 1:
        check_parts(config)
    if packing:
        check_layers(config)
    elif wanted == "auto":
        return AttentionChoice(None, "")
    reasons = {row.name: _refusal(row, config, machine, precision, cp_size) for row in ATTENTIONS}
    if wanted != "auto":
        if reasons[wanted] is not None:
            asked = f"model.attn_implementation: {wanted}" if wanted != OURS else "kernels.attention"
            raise UserError(
                f"{asked} cannot be used: {reasons[wanted]}.",
                hint="Write auto, which takes an exact one that fits." if wanted != OURS else "Leave it out.",
            )
        chosen = next(row for row in ATTENTIONS if row.name == wanted)
        named = chosen.packed if packing or wanted == "varlen" else chosen.name
        return AttentionChoice(named, "", chosen.multiple_of, chosen.one_launch)
    may_be_ours = ours == "auto" and machine.arch in FASTER_ON and precision.half and not _without_triton()
    fitting = [row for row in ATTENTIONS if machine.vendor in row.auto_on and (row.name != OURS or may_be_ours)]
    if all(reasons[row.name] for row in fitting):
        said = "; ".join(f"{row.name}: {reasons[row.name]}" for row in fitting)
        raise UserError(
            f"parallel.cp_size: no attention here computes a part of a row ({said}).",
            hint="It takes varlen, on an NVIDIA GPU from sm80 on, with model.dtype: bfloat16.",
        )
    chosen = next(row for row in fitting if reasons[row.name] is None)
    passed_over = [f"{row.name}: {reasons[row.name]}" for row in fitting[: fitting.index(chosen)]]
    why = "; ".join(["documents isolated", *passed_over])
    return AttentionChoice(chosen.packed, why, chosen.multiple_of, chosen.one_launch)


def _without_triton() -> bool:
    """Whether our kernels would be their references on the GPU here: scores of whole documents, stored."""
    return torch.cuda.is_available() and backend("cuda") == "reference"


def check_layers(config: PreTrainedConfig) -> None:
    """A UserError for layers that carry something from one document of a row into the next."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if kinds - ISOLATED_LAYERS:
        raise UserError(
            f"data.packing: {config.model_type} has {', '.join(sorted(kinds - ISOLATED_LAYERS))} layers, which would "
            "see from one document of a packed row into the next.",
            hint="Write data.packing: false.",
        )


def check_parts(config: PreTrainedConfig) -> None:
    """A UserError for a model that a part of a row would not be computed by as the whole is."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}  # or by kind of layer
    if kinds & BY_LENGTH:
        raise UserError(
            f"parallel.cp_size: {config.model_type} turns by angles ({', '.join(kinds & BY_LENGTH)}) that depend on "
            "how long a row is, and a rank knows its part.",
            hint="Leave it out.",
        )
    if getattr(config, "vision_config", None) is not None:
        raise UserError(
            f"parallel.cp_size: {config.model_type} sees, and rows with images are not shared.", hint="Leave it out."
        )


def missing_here(row: Attention, machine: Machine) -> str | None:
    """Why an attention cannot be used on this machine, whatever the model; or None."""
    capability = int(machine.arch[2:]) if machine.vendor == "nvidia" else 0
    if machine.vendor not in row.runs_on:
        return f"it trains on {' and '.join(VENDORS[vendor] for vendor in row.runs_on)} only"
    if machine.vendor == "nvidia" and capability < row.oldest_nvidia:
        return f"{machine.name} ({machine.arch}) is older than sm{row.oldest_nvidia}"
    if row.package and importlib.util.find_spec(row.package) is None:
        return f"the package {row.package} is not installed"
    return None


def _refusal(
    row: Attention, config: PreTrainedConfig, machine: Machine, precision: Precision, cp_size: int
) -> str | None:
    """Why an attention cannot be used for this model on this machine, or None."""
    if (missing := missing_here(row, machine)) is not None:
        return missing
    if cp_size > 1 and machine.vendor not in row.parts_on:
        return f"it attends to whole rows on {VENDORS[machine.vendor]}, and parallel.cp_size cuts them"
    text = config.get_text_config()
    head_dim = max(getattr(text, name, None) or 0 for name in ("head_dim", "qk_head_dim"))
    head_dim = head_dim or text.hidden_size // text.num_attention_heads
    soft_cap = getattr(text, "attn_logit_softcapping", None)
    if row.half_only and not precision.half:
        return "it computes in bfloat16 or float16 only"
    if soft_cap is not None and not row.soft_cap:
        return f"it has no soft cap, and the model caps its attention scores at {soft_cap:g}"
    if getattr(text, "attention_dropout", 0.0) and not row.dropout:
        return f"it has no dropout, and the model's attention_dropout is {text.attention_dropout:g}"
    if row.flag is not None and (model := model_class(config)) is not None and not getattr(model, row.flag):
        return f"transformers does not offer it for {model.__name__}"
    if head_dim < row.narrowest_head:
        return f"its heads are at least {row.narrowest_head} wide, and the model's are {head_dim}"
    if head_dim > row.widest_head:
        return f"its heads are at most {row.widest_head} wide, and the model's are {head_dim}"
    return None
