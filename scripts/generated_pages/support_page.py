"""The page docs/support.md: which models, methods and parallel strategies work together.

Nothing is listed by hand: each combination is a recipe that the rules and the planner accept or refuse, and each text
model is a small random one that is patched. A test compares the page with what this module makes.
"""

from __future__ import annotations

from pathlib import Path

from support.models import tiny_models
from transformers import AutoConfig

from ligertune.attention.choice import check_shared_rows
from ligertune.data.modalities.image.families import FAMILIES
from ligertune.errors import UserError
from ligertune.hardware import simulated_machine
from ligertune.patching.patch import patch
from ligertune.planning.parallelism import DeviceNeed, check_strategy, choose_strategy
from ligertune.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support.md"
RECIPE = ROOT / "configs" / "quickstart" / "stories260k.yaml"
FITS = DeviceNeed(needed=1, memory=2)
FSDP = {"parallel.strategy": "fsdp"}
# column -> recipe keys; all but the first on four GPUs
STRATEGIES = {
    "one GPU": {"parallel.strategy": "single"},
    "DDP": {"parallel.strategy": "ddp"},
    "FSDP2": FSDP,
    "FSDP2, CPU offload": {**FSDP, "parallel.cpu_offload": "true"},
    "HSDP": {**FSDP, "parallel.dp_replicate_size": 2},
    "context parallel": {**FSDP, "parallel.cp_size": 2},
    "ZeRO-2": {"parallel.strategy": "deepspeed_zero2"},
    "ZeRO-3": {"parallel.strategy": "deepspeed_zero3"},
}
METHODS = {
    "full": {},
    "full, GaLore": {"train.optim": "galore_adamw"},
    "full, 8-bit AdamW of torchao": {"train.optim": "adamw_torch_8bit"},
    "full, 8-bit AdamW of bitsandbytes": {"train.optim": "adamw_8bit"},
    "full, float8": {"train.fp8": "true"},
    "full, float8 of torchao": {"train.fp8": "torchao"},
    "full, torch.compile": {"train.torch_compile": "true"},
    "LoRA": {"method.type": "lora"},
    "LoRA, float8": {"method.type": "lora", "train.fp8": "true"},
    "DoRA": {"method.type": "lora", "method.use_dora": "true"},
    "QLoRA": {"method.type": "qlora"},
    "freeze": {"method.type": "freeze", "method.trainable": "[norm]"},
}
HEADS = {"task": "medusa", "medusa.stage": 2, "medusa.heads_path": "heads"}
TASKS = {
    "Medusa, stage 1: heads": {"task": "medusa"},
    "Medusa, stage 2: full": HEADS,
    "Medusa, stage 2: LoRA": {**HEADS, "method.type": "lora"},
}
SCORES = {
    f"{words}, {method}": {"task": task, **METHODS[method]}
    for task, words in (("classification", "classification"), ("reward", "reward model"))
    for method in ("full", "LoRA", "QLoRA")
}
# of a vision-language model
WITH_IMAGES = {f"images, {name}": METHODS[name] for name in ("full", "LoRA", "QLoRA", "freeze")}
KERNELS = {"rotary": ("apply_rope",), "norms": ("rms_norm", "layer_norm", "gated_rms_norm"),
           "MLP": ("swiglu", "geglu", "reglu", "experts"),
           "loss": ("linear_cross_entropy",)}  # fmt: skip
TEXT = """# What works together

Written by `scripts/support_matrix` from the recipe's rules, the planner and the patching code; CI compares it with them.

## Methods and parallel strategies
✓: a recipe with these settings is accepted. –: it is refused before a model is loaded, with a sentence that says why
and what to write instead. The columns are explained in [several GPUs](distributed.md), the methods in
[methods](methods.md), [LoRA](lora.md), [QLoRA](qlora.md), [Medusa](medusa.md), [classification](classification.md) and [vision](vision.md).

{methods}

ZeRO needs the package deepspeed, QLoRA bitsandbytes, `train.fp8: torchao` torchao. [vision](vision.md#limits) lists further limits
of vision-language models.

## Text models
Layers are recognised by what they compute, and there is no list of models: `ligertune plan` says what it recognised in
yours, and what it left as it was trains, too. CI patches these {count} families and compares losses and gradients with
transformers:

{models}

## Vision-language models
| model | `model_type` | packed rows |
|---|---|---|
{vision}
"""  # noqa: E501, RUF001


def page() -> str:
    vision = AutoConfig.for_model("qwen2_vl")
    rows = [(name, keys, None) for name, keys in {**METHODS, **TASKS, **SCORES}.items()]
    rows += [(name, keys, vision) for name, keys in WITH_IMAGES.items()]
    cells = [[name, *("–" if refusal(keys, strategy, config) else "✓" for strategy in STRATEGIES)]  # noqa: RUF001
             for name, keys, config in rows]  # fmt: skip
    if never := [row[0] for row in cells if "✓" not in row]:  # a misspelled key, for example
        raise SystemExit(f"refused with every strategy: {', '.join(never)}")
    models = text_models()
    packed = {True: "exact", False: "switched off"}
    vision_models = [[row.name, f"`{kind}`", packed[bool(row.packs)]] for kind, row in FAMILIES.items()]
    return TEXT.format(
        methods=table(["", *STRATEGIES], cells),
        models=table(["family", *KERNELS], models),
        count=len(models),
        vision=table([], vision_models),
    )


def refusal(keys: dict[str, object], strategy: str, config: object) -> str | None:
    """Return why a recipe is refused, or None. config: of a vision-language model."""
    chosen = {**keys, **STRATEGIES[strategy]}
    machine = simulated_machine(memory_gib=80, gpus=1 if strategy == "one GPU" else 4)
    try:
        recipe = load_recipe(RECIPE, overrides=[f"{key}={value}" for key, value in chosen.items()])
        resolved, _ = choose_strategy(recipe, machine, why_fsdp="", need=lambda micro: FITS)
        check_strategy(recipe, resolved, autocast="bf16")
        if config is not None and recipe.parallel.cp_size > 1:
            check_shared_rows(config)
    except UserError as error:
        return str(error)
    return None


def text_models() -> list[list[str]]:
    """Return a row per family of tests/support/models/tiny_models.py: which layers are patched."""
    rows = {}
    for family in tiny_models.FAMILIES:
        model = tiny_models.make(family)
        found = {row.kernel: (row.applied, row.left) for row in patch(model).rows}
        cells = [next((done(*found[op]) for op in ops if op in found), "none") for ops in KERNELS.values()]
        rows.setdefault(model.config.model_type, [type(model.config).__name__.removesuffix("Config"), *cells])
    return list(rows.values())


def done(applied: int, left: int) -> str:
    return "✓" if not left else "as in transformers" if not applied else f"{applied} of {applied + left}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *lines] if header else lines)
