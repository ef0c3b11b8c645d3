"""Tables of the training benchmarks. A new benchmark is a new row of TABLES; `benchmarks/training.py` runs them.

Every side of a table trains the same recipe, with the same weights and rows, in a process of its own.
"""

from __future__ import annotations

from benchmarks.workload import Case, Table

# Full fine-tuning's usual rate. Speed does not depend on it.
STEPS = {"train.learning_rate": 1e-5, "train.warmup_steps": 5}
# Batches of similar lengths would change with the seed, and sides must train the same rows.
UNPACKED = {"data.packing": False, "train.group_by_length": False, **STEPS}
FULL = {**UNPACKED, "data.train_on": "all"}
PACKED = {**STEPS, "data.packing": True, "train.group_by_length": False}
EVERYBODY = ("with", "hf", "compile", "liger")
FLOAT8 = ("with", "with-fp8", "with-torchao")
WHOLE_STEPS = "This page compares whole training steps."
CUT = "The model has {} of its {} layers, so the output head takes a larger share of the step than in the whole model."
FULL_ROWS = "Every row is full and every token trains. Padded or masked data change the ratios."
OF_LOSSES = "The page is about losses. The speed of so small a model depends on the host's CPU, too."
IN_TORCH = (
    "Hugging Face's side runs the recurrence in torch, as transformers does where neither flash-linear-attention nor "
    "causal-conv1d is installed."
)
QWEN35 = "Qwen3.5-4B"
LORA = {"method.type": "lora", "train.learning_rate": 1e-4}
ADAPTER = {"method.lora_r": 16, "method.lora_alpha": 32, "method.lora_dropout": 0.0,
           "method.lora_target_modules": "all-linear"}  # fmt: skip


# Models are cut so that weights, gradients and AdamW's states fit on one GPU of 80 GB.


def _whole_steps(page: str, title: str, model: str, layers: int, of: int, batches: tuple[int, ...]) -> Table:
    return Table(
        page=f"whole_steps_{page}",
        title=f"Whole steps, {title}'s layers",
        intro=WHOLE_STEPS,
        caveats=(CUT.format(layers, of), FULL_ROWS),
        cases=(Case(page, "batch {batch}", model, "full rows", batches, layers=layers),),
        sides=("with", "with-recompute", "hf", "compile", "liger"),
        settings=FULL,
        by_step=True,
    )


def _of_llama_1b(name: str, data: str, batch: int, **fields: object) -> Case:
    return Case(name, fields.pop("about", ""), "Llama-3.2-1B", data, (batch,), **fields)


def _beside_llama(name: str, model: str, *, layers: int) -> Case:
    about = f"{model}, micro-batches of {{batch}}"
    return Case(name, about, model, "full rows", (1, 4), 2048, layers=layers, step_rows=4)


# (model.dtype, method.bnb_4bit_quant_type, method.bnb_4bit_use_double_quant): each value of each key
QLORA_FORMATS = (("bfloat16", "nf4", True), ("float32", "nf4", False), ("float32", "fp4", True))


def _qlora_losses(dtype: str, kind: str, double_quant: bool) -> Case:
    about = f"{dtype}, {kind}, {'double' if double_quant else 'single'} quantisation"
    settings = {
        "model.dtype": dtype,
        "method.bnb_4bit_quant_type": kind,
        "method.bnb_4bit_use_double_quant": double_quant,
    }
    name = f"qlora_{dtype}_{kind}"
    return _of_llama_1b(name, "alpaca", 4, about=about, layers=4, settings=settings)


LLAMA_8B = {"model": "Meta-Llama-3-8B", "layers": 8}

# ---- whole steps against Hugging Face, torch.compile and liger-kernel

STEP_TABLES = {
    "llama": _whole_steps("llama", "Llama-3-8B", "Meta-Llama-3-8B", 8, 32, (4, 16, 32)),
    "gemma": _whole_steps("gemma", "Gemma-7B", "gemma-7b", 6, 28, (4, 16)),
    "qwen": _whole_steps("qwen", "Qwen2-7B", "Qwen2-7B", 8, 28, (4, 16)),
    "mistral": _whole_steps("mistral", "Mistral-7B", "Mistral-7B-v0.1", 8, 32, (4, 16)),
    "padded": Table(
        page="unpacked",
        title="Llama-3.2-1B on unpacked Alpaca records",
        intro=WHOLE_STEPS,
        caveats=(
            "ligertune flattens the 16 examples of a batch into one row without padding (`data.padding_free`). With "
            "CUDA graphs the batches are padded, as on the other sides.",
        ),
        cases=(_of_llama_1b("padded", "alpaca", 16),),
        sides=("with", "with-cuda-graphs", "hf", "compile", "liger"),
        settings=UNPACKED,
        by_step=True,
    ),
    # Both sides compute 16,384 positions a step; ligertune also runs with twice as many, which need no more memory.
    "packed": Table(
        page="packed",
        title="Llama-3.2-1B on Alpaca, packed against padded",
        intro=WHOLE_STEPS,
        caveats=(
            "The gain is that of packing and of the kernels together.",
            "Hugging Face's batches are padded to the longest of their records.",
        ),
        cases=(
            _of_llama_1b("padded", "alpaca", 32, about="32 records", settings={"data.packing": False}, sides=("hf",)),
            _of_llama_1b("packed", "alpaca", 8, about="8 rows of 2,048", length=2048, sides=("with",)),
            _of_llama_1b("packed_16", "alpaca", 16, about="16 rows of 2,048", length=2048, sides=("with",)),
        ),
        sides=("with", "hf"),
        settings=PACKED,
        by_step=True,
    ),
    "packed_rows": Table(
        page="packed_rows_llama_1b",
        title="Llama-3.2-1B, 16 packed rows of 512 tokens (Alpaca)",
        intro=WHOLE_STEPS,
        caveats=("All sides train on the same packed rows. The page shows the kernels, not packing.",),
        cases=(_of_llama_1b("packed_rows", "alpaca", 16),),
        sides=EVERYBODY,
        settings=PACKED,
        by_step=True,
    ),
    "tiny": Table(
        page="short_rows",
        title="Llama-3.2-1B, one row of 128 tokens",
        intro=WHOLE_STEPS,
        caveats=(
            "The workload is chosen to show launch overhead: the host takes longer to launch such a step than the GPU "
            "to compute it. The result depends on the host's CPU.",
            "Two runs on two hosts gave ligertune without CUDA graphs about 0.9 and 1.2 times Hugging Face's tokens/s.",
        ),
        cases=(_of_llama_1b("tiny", "full rows", 1, length=128),),
        sides=("with", "with-cuda-graphs", "with-compile", "hf", "compile", "liger"),
        settings=FULL,
        by_step=True,
    ),
    "lora": Table(
        page="lora",
        title="LoRA on Llama-3-8B's layers",
        intro=WHOLE_STEPS,
        caveats=("The model has 8 of its 32 layers. Adapters are on every linear layer.", FULL_ROWS),
        cases=(Case("lora", "batch {batch}", data="full rows", batches=(16,), settings=LORA, **LLAMA_8B),),
        sides=("with", "no-lora", "hf", "compile", "liger"),
        settings=FULL,
        by_step=True,
    ),
    "lora_dropout": Table(
        page="lora_dropout",
        title="LoRA with dropout on Llama-3.2-1B and on Llama-3-8B's layers",
        intro="This page compares `kernels.lora` with PEFT's layers, which `kernels.lora: auto` leaves dropout to.",
        caveats=(
            "The larger model has 8 of its 32 layers. Adapters are on every linear layer; `lora_dropout` is 0.05.",
            "The sides drop other elements, so their losses differ. The other kernels run on both.",
            FULL_ROWS,
        ),
        cases=(
            _of_llama_1b("llama_1b", "full rows", 16, about="Llama-3.2-1B, batch 16"),
            Case("llama_8b", "8 layers of Llama-3-8B, batch 16", data="full rows", batches=(16,), **LLAMA_8B),
        ),
        sides=("no-lora", "with-lora"),
        settings={**FULL, **ADAPTER, **LORA, "method.lora_dropout": 0.05},
        steps=15,
        by_step=True,
    ),
    "hybrid": Table(
        page="hybrid",
        title="Whole steps, Qwen3.5-4B's layers",
        intro=WHOLE_STEPS,
        caveats=(CUT.format(8, 32), FULL_ROWS, IN_TORCH),
        cases=(Case("hybrid", "{batch} rows of 2,048", QWEN35, "full rows", (4,), layers=8, length=2048),),
        sides=("with", "hf"),
        settings=FULL,
        by_step=True,
    ),
    "hybrids": Table(
        page="hybrids",
        title="Whole steps of layers of Nemotron-H, Kimi-Linear and Llama",
        intro=WHOLE_STEPS,
        caveats=(
            "Nemotron-H-8B has 14 of its 52 layers, Kimi-Linear-48B-A3B 4 of its 27, Llama-3.1-8B 8 of its 32, so the "
            "output head takes a larger share of the step than in the whole models.",
            "Every optimizer step has four rows of 2,048 tokens: four micro-batches of one, or one of four.",
            FULL_ROWS,
            IN_TORCH,
        ),
        cases=(
            _beside_llama("nemotron_h", "Nemotron-H-8B", layers=14),
            _beside_llama("kimi_linear", "Kimi-Linear-48B-A3B", layers=4),
            _beside_llama("llama", "Llama-3.1-8B", layers=8),
        ),
        sides=("with", "hf"),
        settings=FULL,
        by_step=True,
    ),
    "hybrid_lora": Table(
        page="hybrid_lora",
        title="LoRA on Qwen3.5-4B, Alpaca: packed against padded",
        intro=WHOLE_STEPS,
        caveats=(
            "The gain is that of packing and of the kernels together: transformers' functions in torch do not keep "
            "packed documents apart.",
            "Hugging Face's batches are padded to the longest of their records. Its fastest batch is what is compared.",
            IN_TORCH,
        ),
        cases=(
            Case(
                "padded",
                "{batch} records",
                QWEN35,
                "alpaca",
                (4, 8, 16),
                settings={"data.packing": False},
                sides=("hf",),
            ),
            Case("packed", "2 rows of 2,048", QWEN35, "alpaca", (2,), length=2048, sides=("with",)),
        ),
        sides=("with", "hf"),
        settings={**PACKED, **LORA},
        by_step=True,
    ),
    "hybrid_losses": Table(
        page="hybrid_losses",
        title="200 steps of two layers of Qwen3.5-4B, in float32",
        intro=WHOLE_STEPS,
        caveats=(IN_TORCH, OF_LOSSES),
        cases=(Case("hybrid_losses", "1 row of 2,048", QWEN35, "full rows", (1,), layers=2, length=2048),),
        sides=("with", "hf"),
        settings={**FULL, "model.dtype": "float32"},
        steps=200,  # a state that is wrong by little shows after many updates
        small_steps=10,
    ),
    "qlora_losses": Table(
        page="qlora_losses",
        title="200 steps of QLoRA: four layers of Llama-3.2-1B",
        intro=WHOLE_STEPS,
        caveats=(
            "Hugging Face's side runs PEFT's layers and bitsandbytes' products.",
            "Random weights in 4 bits, the same for both sides; Alpaca records, padded to the longest of their batch.",
            OF_LOSSES,
        ),
        cases=tuple(_qlora_losses(dtype, kind, double) for dtype, kind, double in QLORA_FORMATS),
        sides=("with", "hf"),
        settings={**UNPACKED, **ADAPTER, "method.type": "qlora", "train.learning_rate": 1e-4},
        steps=200,  # gradients that are wrong by little show after many updates
        small_steps=10,
    ),
    "fp8": Table(
        page="fp8",
        title="float8 on Llama-3-8B's layers",
        intro=WHOLE_STEPS,
        caveats=(
            "ligertune only: no other tool was measured.",
            "The model has 8 of its 32 layers.",
            FULL_ROWS,
            "Losses of a few steps do not show what float8 does to a long training; `fp8_losses` compares 200 steps.",
        ),
        cases=(Case("fp8", "batch {batch}", data="full rows", batches=(16, 32), **LLAMA_8B),),
        sides=FLOAT8,
        settings=FULL,
        by_step=True,
    ),
    "fp8_losses": Table(
        page="fp8_losses",
        title="200 steps in float8: Llama-3.2-1B",
        intro=WHOLE_STEPS,
        caveats=(
            "Random weights, trained on 200 batches of 16 packed rows of 512 tokens of Alpaca records.",
            "Each side trains once, on the same batches in the same order.",
            "bfloat16 training that rounds otherwise drifts, too: differences grow with the steps.",
            OF_LOSSES,
        ),
        cases=(_of_llama_1b("fp8_losses", "alpaca", 16),),
        sides=FLOAT8,
        settings={**PACKED, "train.learning_rate": 1e-4, "train.warmup_steps": 20},
        steps=200,  # differences of roundings grow with the steps: few do not show them
        small_steps=10,
        by_step=True,
        curves=True,
    ),
    "fp8_tuning": Table(
        page="fp8_tuning",
        title="200 steps of fine-tuning in float8: Llama-3.2-1B",
        intro=WHOLE_STEPS,
        caveats=(
            "400 steps in bfloat16 from random weights, learning rate 3e-4, then 200 measured steps, 2e-5.",
            "Batches of 16 packed rows of 512 tokens of Alpaca records, the same for all sides and both parts.",
            "Each side trains once, from the same weights, on the same batches in the same order.",
            OF_LOSSES,
        ),
        cases=(_of_llama_1b("fp8_tuning", "alpaca", 16),),
        sides=FLOAT8,
        settings={**PACKED, "train.learning_rate": 2e-5, "train.warmup_steps": 20},
        steps=200,
        small_steps=10,
        by_step=True,
        before=2,  # times the measured steps: fine-tuning begins with trained weights
        curves=True,
    ),
    "moe_steps": Table(
        page="moe_steps",
        title="Whole steps of mixtures of experts",
        intro="This page compares steps of full fine-tuning of mixtures that are cut to a few layers.",
        caveats=(
            "Published sizes, random words. mixtral-8x7b has 3 of its 32 layers, qwen3-30b-a3b 4 of 48. Full rows.",
        ),
        cases=(
            Case("mixtral", "mixtral-8x7b", "mixtral-8x7b", "random words", (16,), layers=3),
            Case("qwen3", "qwen3-30b-a3b", "qwen3-30b-a3b", "random words", (16,), layers=4),
        ),
        sides=("with", "hf", "liger"),
        settings={"data.packing": False, "train.optim": "adamw_torch_fused"},
    ),
}

# ---- ways to put records into a step: 16,384 tokens, padding included

ALONE = {"data.packing": False, "data.padding_free": False}
UNSORTED = {**ALONE, "train.group_by_length": False}


def _packing(name: str, title: str, model: str, layers: int | None) -> Table:
    def case(way: str, batch: int, length: int, settings: dict[str, object]) -> Case:
        return Case(way, way, model, "alpaca", (batch,), length, layers, settings=settings)

    return Table(
        page=f"packing_{name}",
        title=f"Padded and packed rows, {title}",
        intro="This page compares ways to put records of different lengths into a step, all with ligertune's kernels.",
        caveats=(
            "ligertune only: no other tool was measured.",
            "shuffled: each record in its own row, padded to the longest of its batch. grouped: the same, in batches "
            "of similar lengths. padding-free: the records of shuffled, concatenated. packed: rows of 2,048 tokens.",
        ),
        cases=(
            case("shuffled", 32, 512, UNSORTED),
            case("grouped", 32, 512, ALONE),
            case("padding-free", 32, 512, {**UNSORTED, "data.padding_free": True}),
            case("packed", 8, 2048, {"data.packing": True}),
            case("packed-flex", 8, 2048, {"data.packing": True, "model.attn_implementation": "flex_attention"}),
            case("packed-sdpa", 8, 2048, {"data.packing": True, "model.attn_implementation": "sdpa"}),
        ),
        sides=("with",),
        warmup=10,  # batches of other lengths compile other kernels
        extra=(("padded_tokens_per_second", "tokens/s with padding", ",.0f"), ("padding_share", "padding", ".1%")),
    )


PACKING_TABLES = {
    "packing_1b": _packing("1b", "Llama-3.2-1B", "Llama-3.2-1B", None),
    "packing_8b": _packing("8b", "8 layers of Llama-3-8B", "Meta-Llama-3-8B", 8),
}

# ---- whole models of 7B and 8B on one GPU

AUTOMODEL = "https://docs.nvidia.com/nemo/automodel/performance/performance-summary.md"
PLAIN = {"train.warmup_steps": 0, "train.lr_scheduler_type": "constant", "train.group_by_length": False}
# NVIDIA's published setting: no clipping, 32 rows a step. With 8 rows the optimizer steps four times as often.
ADAPTED = {**ADAPTER, **LORA, "train.max_grad_norm": 0, "train.optim": "adamw_torch_fused"}
WHOLE = {"train.learning_rate": 1e-5, "train.gradient_checkpointing": True, "data.packing": False,
         "data.train_on": "all"}  # fmt: skip


def _published(name: str, about: str, model: str, data: str = "full rows", **more: object) -> Case:
    packed = data == "alpaca"
    method = {"method.type": more.pop("method", "lora")}
    rows = {"data.packing": True} if packed else {"data.packing": False, "data.train_on": "all"}
    return Case(name, about, model, data, (2,), 4096, step_rows=32, settings={**ADAPTED, **rows, **method}, **more)


ONE_CARD = {**ADAPTED, "data.packing": False, "data.train_on": "all"}


def _one_card(name: str, about: str, model: str, **settings: object) -> Case:
    """Rows of 4,096 tokens, four micro-batches of one row in a step."""
    return Case(name, about, model, "full rows", (1,), 4096, step_rows=4, settings={**ONE_CARD, **settings})


QLORA = {"method.type": "qlora", "train.gradient_checkpointing": True}
LAUNCHED = {"train.cuda_graphs": False}
WHOLE_MODELS = {
    "one_card": Table(
        page="one_card",
        title="LoRA and QLoRA on one card",
        intro="This page compares steps that are recorded as CUDA graphs with steps whose kernels the host launches.",
        caveats=("r 16, alpha 32 on all linear layers of the layers; steps of 4 rows of 4,096 tokens, one by one.",),
        cases=(
            _one_card("qlora", "Llama-3-8B, QLoRA", "Meta-Llama-3-8B", **QLORA),
            _one_card(
                "qlora_offload",
                "the same, inputs of layers in host memory",
                "Meta-Llama-3-8B",
                **QLORA | {"train.gradient_checkpointing": "offload"},
            ),
            _one_card("qlora_launched", "Llama-3-8B, QLoRA, no graphs", "Meta-Llama-3-8B", **QLORA, **LAUNCHED),
            _one_card(
                "qlora_padded",
                "the same, and attention of torch",
                "Meta-Llama-3-8B",
                **QLORA,
                **LAUNCHED,
                **{"data.padding_free": False},
            ),
            _one_card("lora_1b", "Llama-3.2-1B, LoRA", "Llama-3.2-1B", **{"method.type": "lora"}),
            _one_card(
                "lora_1b_launched",
                "Llama-3.2-1B, LoRA, no graphs",
                "Llama-3.2-1B",
                **LAUNCHED,
                **{"method.type": "lora"},
            ),
        ),
        sides=("with",),
        settings=PLAIN,
        steps=8,
        warmup=3,
    ),
    "published_lora": Table(
        page="published_lora",
        title="LoRA on whole Llama-3-8B and Qwen2.5-7B",
        intro="This page compares LoRA fine-tuning of whole models with the numbers that NVIDIA publishes for "
        "AutoModel, and with other libraries.",
        caveats=(
            "Setting of NVIDIA's published rows: r 16, alpha 32 on all linear layers of the layers, bfloat16, "
            "micro-batch 2, rows of 4,096 tokens, no clipping, no activation checkpointing.",
            "Their steps have 32 rows. With fewer, the optimizer steps more often per token.",
            "AutoModel was not run here: its numbers are those that NVIDIA publishes for one H100 "
            f"({AUTOMODEL}). Its versions and its GPU's clocks are not those of this page.",
            "Rows are full and every token trains, except in packed records, where all sides train on the same rows.",
        ),
        cases=(
            _published("lora_llama", "Llama-3-8B, LoRA", "Meta-Llama-3-8B", published=12_473),
            _published("lora_qwen", "Qwen2.5-7B, LoRA", "Qwen2.5-7B", published=14_110),
            _published("lora_4bit", "Llama-3-8B, QLoRA", "Meta-Llama-3-8B", method="qlora"),
            _published("lora_packed", "Llama-3-8B, LoRA, packed records", "Meta-Llama-3-8B", "alpaca"),
        ),
        sides=("with", "liger", "hf", "compile"),
        settings=PLAIN,
        steps=4,  # a step of 32 rows takes over 8 s on an H100
        warmup=2,
        published_by="NVIDIA AutoModel, as published",
    ),
    "full_llama_8b": Table(
        page="full_llama_8b",
        title="Full fine-tuning of Llama-3-8B on one GPU",
        intro="This page compares full fine-tuning of the whole model with rows of 4,096 and of 8,192 tokens.",
        caveats=(
            "A step is one micro-batch, so that the optimizer takes a larger share of it than with accumulation. "
            "AdamW's states have 8 bits (bitsandbytes): with bfloat16 ones, weights, gradients and states alone would "
            "take 60 GiB.",
            "All sides checkpoint activations; ligertune checkpoints as few layers as its memory plan allows "
            "(`train.gradient_checkpointing_layers: auto`), the others all layers.",
            "Rows are full and every token trains.",
        ),
        cases=(
            Case("full_4096", "Llama-3-8B, full, 2 x 4,096", "Meta-Llama-3-8B", "full rows", (2,), 4096),
            Case("full_8192", "Llama-3-8B, full, 1 x 8,192", "Meta-Llama-3-8B", "full rows", (1,), 8192),
        ),
        sides=("with", "liger", "hf", "compile"),
        settings={**PLAIN, **WHOLE, "train.gradient_checkpointing_layers": "auto", "train.optim": "adamw_8bit"},
        steps=4,
        warmup=2,
    ),
}

# ---- the host's part of a step, of small and medium models

FULL_ROW = {"data.packing": False, "data.train_on": "all", "train.optim": "adamw_torch_fused"}
OF_1B = {"model": "Llama-3.2-1B", "data": "full rows", "length": 2048}
HOST_TIME = Table(
    page="host_time",
    title="Host time of small and medium models",
    intro="This page shows how much of a step the GPU computes, and how long a first step takes that compiles all of "
    "its kernels.",
    caveats=(
        "GPU busy is the time in which a kernel or a copy ran on the GPU, divided by the median step. The profiler "
        "slows the host down, so the two come from different steps of one run: the step from the measured ones, the "
        "busy time from 3 traced ones after them. A share of a little over 100 % is possible.",
        "Launches are the host's calls that launch a kernel or a CUDA graph, on average over the traced steps.",
        "Each run starts with an empty TRITON_CACHE_DIR. The cold first step ends when the GPU has finished it; the "
        "cold start is that step, loading of the model, and preparation. Random weights load faster than files.",
        "ligertune only: no other tool was measured.",
        FULL_ROWS,
    ),
    cases=(
        Case("host_lora_1b", "Llama-3.2-1B, LoRA, {batch} x 4,096", "Llama-3.2-1B", "full rows", (1,), 4096,
             settings={**FULL_ROW, **ADAPTED, "method.type": "lora"}),
        Case("host_full_1b", "Llama-3.2-1B, full, {batch} x 2,048", batches=(1, 2, 4), settings=FULL_ROW, **OF_1B),
        Case("host_full_05b", "Qwen2.5-0.5B, full, {batch} x 2,048", "Qwen2.5-0.5B", "full rows", (1, 4), 2048,
             settings=FULL_ROW),
        Case("host_dpo_1b", "Llama-3.2-1B, DPO, full, {batch} pairs", "Llama-3.2-1B", "pairs", (4,), 2048,
             settings={"task": "dpo", "preference.reference": "precompute", "data.packing": False}),
        Case("host_fp8_1b", "Llama-3.2-1B, full, float8, {batch} x 2,048", batches=(4,),
             settings={**FULL_ROW, "train.fp8": True}, **OF_1B),
        Case("host_qlora_8b", "Llama-3-8B, QLoRA, {batch} x 4,096", "Meta-Llama-3-8B", "full rows", (1,), 4096,
             settings={**FULL_ROW, **ADAPTED, **QLORA}),
    ),
    sides=("with",),
    settings={**PLAIN, "train.learning_rate": 1e-5},
    by_step=True,
    profiled=3,
    extra=(
        ("gpu_busy", "GPU busy", ".1%"),
        ("launches", "launches/step", ",.0f"),
        ("graphs", "CUDA graphs", ""),
        ("cold_first_step", "cold first step, s", ".1f"),
        ("cold_start", "cold start, s", ".1f"),
    ),
)  # fmt: skip

# ---- preferences, distillation and scores against TRL's and transformers' trainers

TRAINED = {**PLAIN, "data.packing": False, "data.padding_free": True, "train.optim": "adamw_torch_fused",
           "train.gradient_checkpointing": True, "train.learning_rate": 1e-5}  # fmt: skip
DPO = {**TRAINED, "task": "dpo", "preference.reference": "precompute"}
ADAPTED_8B = {**ADAPTER, **LORA}
REAL_TEXTS = "Real texts: prompts of ShareGPT users with answers of Qwen3-235B and GPT-4."
SAME_STEPS = "Gradient checkpointing and fused AdamW on all sides; the same weights, examples and order."
BEFOREHAND = (
    "Reference log-probabilities are computed before training on all sides that support it, outside the measured time."
)


def _flattened(other: str, why: str = "") -> str:
    return f"ligertune flattens a step into one row without padding. {other} pads to the longest{why}."


def _rounded(test: str) -> str:
    return f"In float32 the losses agree (`tests/integration/{test}.py`). In bfloat16 they are rounded and differ."


def _trained(page: str, title: str, case: Case, caveats: tuple[str, ...], settings: dict[str, object]) -> Table:
    return Table(
        page=page,
        title=title,
        intro="This page compares training steps on the same examples.",
        caveats=(*caveats, SAME_STEPS),
        cases=(case,),
        sides=("with", "trainer", "trainer_liger", "trainer_patched"),
        settings=settings,
        steps=12,
        warmup=3,
    )


OF_DPO = (REAL_TEXTS, _flattened("TRL", ", because TRL 1.16 has switched off `padding_free` of DPO"), BEFOREHAND,
          _rounded("test_trl_preference"))  # fmt: skip
OF_SCORES = _rounded("test_score_trainers")
LLAMA_1B, LLAMA = "Llama-3.2-1B", "Meta-Llama-3-8B"
TRAINER_TABLES = {
    "dpo_full": _trained("dpo_llama_1b", "DPO of Llama-3.2-1B, full training",
                         Case("dpo_full", "{batch} pairs", LLAMA_1B, "pairs", (8, 32), 2048), OF_DPO, DPO),
    "dpo_lora": _trained("dpo_lora_llama_8b", "DPO of Llama-3-8B with LoRA",
                         Case("dpo_lora", "{batch} pairs", LLAMA, "pairs", (4, 16), 2048),
                         OF_DPO, {**DPO, **ADAPTED_8B}),
    "distill": _trained("distill_llama_8b_1b", "Distillation of Llama-3-8B to Llama-3.2-1B",
                        Case("distill", "{batch} sequences", LLAMA_1B, "completions", (8,), 2048, teacher=LLAMA),
                        (REAL_TEXTS, _flattened("TRL's GKDTrainer (lmbda 0)"), _rounded("test_trl_distill")),
                        {**TRAINED, "task": "distill", "distill.loss": "jsd", "distill.beta": 0.5}),
    "classification": _trained("classification_llama_1b", "Classification with Llama-3.2-1B",
                               Case("classification", "{batch} texts", LLAMA_1B, "texts", (32,), 2048),
                               (_flattened("Trainer"), OF_SCORES), {**TRAINED, "task": "classification"}),
    "reward": _trained("reward_llama_1b", "Reward model of Llama-3.2-1B, full training",
                       Case("reward", "{batch} pairs", LLAMA_1B, "pairs", (16,), 2048),
                       (REAL_TEXTS, _flattened("RewardTrainer"), OF_SCORES), {**TRAINED, "task": "reward"}),
    "reward_lora": _trained("reward_lora_llama_8b", "Reward model of Llama-3-8B with LoRA",
                            Case("reward_lora", "{batch} pairs", LLAMA, "pairs", (8,), 2048),
                            (REAL_TEXTS, _flattened("RewardTrainer"), OF_SCORES),
                            {**TRAINED, **ADAPTED_8B, "task": "reward"}),
}  # fmt: skip

# ---- other tools, each with the packages that it needs (--site)

CHECKPOINTED = {"train.gradient_checkpointing": True}
OF_LORA = {**ADAPTED, "data.packing": False, "data.train_on": "all"}
OF_FULL = {"train.learning_rate": 1e-5, "train.optim": "adamw_torch_fused", "data.packing": False}
BOTH_OF_OURS = ("with", "with-offload", "unsloth", "automodel")
SAME_WEIGHTS = (
    "All sides load the same random weights from a folder and train the same token ids in the same order. All start "
    "with the adapter that PEFT draws from the seed: r 16, alpha 32, all linear layers of the layers."
)
PEAK = "Peak memory is what torch has allocated in the measured steps. Loading and warm-up are not counted."


def _peer_case(name: str, about: str, model: str, rows: tuple[int, int, int], **more: object) -> Case:
    """Return a case. rows: rows of a micro-batch and of a step, and tokens of a row."""
    batch, step_rows, length = rows
    data = more.pop("data", "full rows")
    return Case(name, about, model, data, (batch,), length, step_rows=step_rows, **more)


PEER_TABLES = {
    "peers": Table(
        page="peers",
        title="Fine-tuning against unsloth and AutoModel",
        intro="This page compares training steps with other tools that run on the same machine.",
        caveats=(
            SAME_WEIGHTS,
            PEAK,
            "Rows are full and every token trains, except in packed records, where answers train.",
            "unsloth trains in transformers' Trainer. AutoModel trains in its own recipe, with the loss and the model "
            "class of NVIDIA's example recipes for Llama; `--sides automodel_fused` takes AutoModel's fused loss.",
            "Checkpointing is `true` or `offload` in ligertune, unsloth's default, and `true` in AutoModel. All tools "
            "are without it where a row does not name it.",
        ),
        cases=(
            _peer_case("qlora_8b", "QLoRA Llama-3-8B, 1 x 4,096, 4 accumulated, checkpointing", LLAMA, (1, 4, 4096),
                       settings={**OF_LORA, **CHECKPOINTED, "method.type": "qlora"}, sides=BOTH_OF_OURS),
            _peer_case("lora_8b", "LoRA Llama-3-8B, 2 x 4,096, 4 accumulated", LLAMA, (2, 8, 4096), settings=OF_LORA),
            _peer_case("lora_8b_checkpointed", "LoRA Llama-3-8B, 2 x 4,096, 4 accumulated, checkpointing", LLAMA,
                       (2, 8, 4096), settings={**OF_LORA, **CHECKPOINTED}, sides=BOTH_OF_OURS),
            _peer_case("full_1b", "full Llama-3.2-1B, 4 x 2,048", LLAMA_1B, (4, 4, 2048),
                       settings={**OF_FULL, "data.train_on": "all"}),
            _peer_case("full_1b_packed", "full Llama-3.2-1B, 4 x 2,048 of packed Alpaca", LLAMA_1B, (4, 4, 2048),
                       data="alpaca", settings={**OF_FULL, "data.packing": True}),
            _peer_case("lora_1b", "LoRA Llama-3.2-1B, 1 x 4,096", LLAMA_1B, (1, 1, 4096), settings=OF_LORA),
        ),
        sides=("with", "unsloth", "automodel"),
        settings=PLAIN,
        steps=8,
        warmup=3,
        by_step=True,
        written=True,
    ),
    "peers_dpo": Table(
        page="peers_dpo",
        title="DPO with LoRA against TRL and unsloth",
        intro="This page compares training steps with other tools that run on the same machine.",
        caveats=(SAME_WEIGHTS, PEAK, *OF_DPO, "unsloth trains in TRL's DPOTrainer. All sides checkpoint activations."),
        cases=(
            Case("dpo_1b", "Llama-3.2-1B, {batch} pairs", LLAMA_1B, "pairs", (8,), 2048),
            Case("dpo_8b", "Llama-3-8B, {batch} pairs", LLAMA, "pairs", (24,), 2048),
        ),
        sides=("with", "with-offload", "trainer", "unsloth"),
        # TRL's default rate: at that of the other LoRA rows the loss is 0.001 after ten steps, and roundings decide it
        settings={**DPO, **ADAPTED_8B, "train.learning_rate": 1e-6},
        steps=8,
        warmup=3,
        by_step=True,
        written=True,
    ),
}  # fmt: skip

# ---- vision-language models on real images

PIXELS = {"vision.image_max_pixels": 1_003_520, "train.learning_rate": 1e-5}
ALL_TRAINS = {"vision.freeze_vision_tower": False, "vision.freeze_projector": False}


def _vision(page: str, model: str, title: str, settings: dict[str, object], steps: int) -> Table:
    return Table(
        page=page,
        title=f"{model} on real images",
        intro=f"This page compares training of {model}, {title}, with and without the kernels.",
        caveats=(
            "Both sides run in ligertune with the same packed rows: the page shows the kernels and not the packing. No "
            "other tool was measured.",
            "One packed row of 4,096 tokens a step; the images are real.",
        ),
        cases=(Case(page, "", f"{model}-Instruct", "images", (1,), 4096),),
        sides=("with", "hf"),
        settings={**PIXELS, **settings},
        steps=steps,
        extra=(("images_per_second", "images/s", ".1f"), ("image_tokens_per_second", "image tokens/s", ",.0f")),
    )


VISION_TABLES = {
    "vision_2b": _vision("vision_qwen2_vl_2b", "Qwen2-VL-2B", "all of it trains", ALL_TRAINS, 15),
    "vision_7b": _vision("vision_qwen2_vl_7b", "Qwen2-VL-7B", "LoRA, the vision tower is frozen",
                         {"method.type": "lora", "train.gradient_checkpointing": True}, 5),
}  # fmt: skip

TABLES: dict[str, Table] = {**STEP_TABLES, **PACKING_TABLES, **WHOLE_MODELS, "host_time": HOST_TIME, **TRAINER_TABLES,
                            **PEER_TABLES, **VISION_TABLES}  # fmt: skip
