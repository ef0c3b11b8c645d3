"""Schema of the recipe: every section except those in train_sections.py, with keys, types, defaults and bounds.

`ligertune recipe keys`, `recipe schema`, `init` and the error messages are made from these definitions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr

from ligertune.recipe.section import (
    AutoSwitch,
    FileOrHub,
    NameList,
    Section,
    ShareBelowOne,
    Switch,
    SwitchOrNorms,
    Template,
    Text,
)
from ligertune.recipe.train_sections import CheckpointSpec, EvalSpec, MedusaSpec, TrainSpec


class TokenizerSpec(Section):
    """Tokenizer settings that differ from the model's."""

    path: FileOrHub | None = Field(None, description="Hub id or folder of another tokenizer; null: the model's.")
    pad_token: Text | None = Field(
        None, description="Padding token; null: the tokenizer's, or one that is not the EOS token."
    )
    eos_token: Text | None = Field(None, description="End-of-sequence token; null: the tokenizer's.")
    chat_template: Template = Field(
        "tokenizer", description="Chat template: tokenizer (its own template), a built-in name, or a Jinja file."
    )


class ModelSpec(Section):
    """The model to train, and how to load it."""

    model_name_or_path: FileOrHub = Field(description="Hub id or folder of the model.")
    revision: Text = Field("main", description="Branch, tag or commit of the model on the hub.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Dtype of the weights; float16: mixed precision with loss scaling; auto: bfloat16 if supported.",
    )
    attn_implementation: Literal["auto", "varlen", "sdpa", "flex_attention", "flash_attention_2", "eager"] = Field(
        "auto",
        description="Attention implementation; varlen: torch's flash attention for packed documents; auto: an exact "
        "one that the model and the device support.",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="Load pretrained weights, or initialise random ones (for benchmarks and tests)."
    )
    num_hidden_layers: PositiveInt | None = Field(
        None, description="With init: random: number of layers to build; null: all."
    )
    trust_remote_code: Switch = Field(False, description="Run model code that comes with the checkpoint.")
    tokenizer: TokenizerSpec = Field(TokenizerSpec(), description="Tokenizer settings that differ from the model's.")


class KernelsSpec(Section):
    """Which Triton kernels replace the model's layers."""

    enabled: AutoSwitch = Field(
        "auto", description="Use the kernels; auto: where the device runs Triton and a layer is recognised."
    )
    rope: Switch = Field(True, description="Use the kernel for rotary position embeddings.")
    norm: Switch = Field(True, description="Use the kernels for RMSNorm and LayerNorm.")
    mlp: Switch = Field(True, description="Use the kernels for SwiGLU and GeGLU.")
    loss: Literal["linear_cross_entropy", "cross_entropy", "torch"] = Field(
        "linear_cross_entropy",
        description="Loss implementation; linear_cross_entropy: never stores the logits; cross_entropy: a kernel on "
        "stored logits; torch: PyTorch's.",
    )
    attention: AutoSwitch = Field(
        "auto",
        description="Use the attention kernel for packed documents; auto: in half precision on sm90, where it is "
        "measured to be faster.",
    )
    lora: Switch = Field(False, description="Fuse the LoRA update into the matrix multiplication.")
    optimizer: Switch = Field(
        False, description="With train.optim: adamw_torch_fused: use the AdamW kernel, which also clips gradients."
    )
    recompute: SwitchOrNorms = Field(
        False,
        description="Recompute norm outputs and gated activations in the backward instead of saving them: less memory, "
        "more time, bit-equal gradients; norms: norm outputs only.",
    )


class MethodSpec(Section):
    """Which weights train. LoRA: W x + (lora_alpha / lora_r) B A x with frozen W, A: (R, E), B: (E, R)."""

    type: Literal["full", "lora", "qlora", "freeze"] = Field(
        "full",
        description="full: all weights; lora: a low-rank adapter; qlora: an adapter on 4-bit weights; freeze: the "
        "parameters that `trainable` matches.",
    )
    lora_r: PositiveInt = Field(16, description="LoRA rank R.")
    lora_alpha: PositiveFloat = Field(32.0, description="LoRA scale; the update is multiplied by lora_alpha / lora_r.")
    lora_dropout: ShareBelowOne = Field(0.0, description="Dropout probability of the adapter's input.")
    lora_target_modules: Literal["all-linear"] | NameList = Field(
        "all-linear",
        description="Layers to adapt: all-linear (every linear layer except the output head), or a list of names.",
    )
    lora_modules_to_save: NameList = Field(
        (), description="Layers to train in full in addition to the adapter, such as lm_head."
    )
    use_dora: Switch = Field(False, description="Use DoRA: train the magnitude of each weight and its direction.")
    use_rslora: Switch = Field(False, description="Use rsLoRA: divide lora_alpha by the square root of lora_r.")
    trainable: NameList = Field(
        (), description="With type: freeze: regular expressions; parameters whose names match one of them train."
    )


class DatasetSpec(Section):
    """One data set."""

    path: FileOrHub = Field(description="Hub id, file, folder or glob; json, jsonl, parquet, csv or txt, also .gz.")
    name: Text | None = Field(None, description="Configuration (subset) of a hub data set.")
    split: Text = Field("train", description="Split of a hub data set.")
    format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text", "llava"] = Field(
        "auto", description="Row format; auto: recognised by the columns."
    )
    columns: dict[str, str] = Field({}, description="Columns to rename, as {expected: actual}.")
    max_samples: PositiveInt | None = Field(None, description="Maximum number of rows to read; null: all.")
    weight: PositiveFloat = Field(
        1.0, description="How often an epoch repeats the data set; 0.5: a random half, drawn with train.seed."
    )
    on_bad_row: Literal["drop", "repair", "error"] = Field(
        "drop",
        description="Unusable rows; drop: drop and count them; repair: fix what can be fixed, drop the rest; error: "
        "stop.",
    )


class DataSpec(Section):
    """Data sets, and how to format, tokenize, mask and batch them."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(strict=False, min_length=1)] = Field(
        description="Data sets to train on; each needs a path."
    )
    val_split: ShareBelowOne = Field(0.0, description="Share of the examples to hold out for evaluation.")
    eval_datasets: Annotated[tuple[DatasetSpec, ...], Field(strict=False)] = Field(
        (), description="Data sets to evaluate on, instead of val_split."
    )
    prompt_template: Template = Field(
        "auto", description="Prompt format: auto, chat (the tokenizer's chat template), alpaca, or a Jinja file."
    )
    system_prompt: str | None = Field(None, description="System prompt for conversations without one.")
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant", description="Tokens with labels: all assistant turns, the last assistant turn, or all tokens."
    )
    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="Maximum length of an example, in tokens.")
    on_overlength: Literal["drop", "truncate", "error"] = Field(
        "drop", description="Examples longer than max_length: drop, truncate, or stop; their number is reported."
    )
    streaming: Switch = Field(
        False, description="Read and shuffle the data during training, in bounded memory; needs train.max_steps."
    )
    packing: Switch = Field(
        True, description="Pack several examples into each row of max_length tokens; examples do not attend to others."
    )
    padding_free: AutoSwitch = Field(
        "auto",
        description="Without packing: flatten the examples of a batch into one row instead of padding them; auto: "
        "where the kernels run and one attention call separates the examples.",
    )
    num_proc: Literal["auto"] | PositiveInt = Field(
        "auto", description="Processes that prepare the data; auto: one per CPU core."
    )
    image_dir: FileOrHub | None = Field(
        None, description="Folder of relative image paths; null: the folder of the data file."
    )
    cache: Switch = Field(
        True, description="Cache the prepared data in the user's cache folder, or in $LIGERTUNE_CACHE."
    )


class LoggingSpec(Section):
    """Metrics that are logged during training."""

    logging_steps: PositiveInt = Field(10, description="Steps between lines of metrics.jsonl.")
    report_to: Annotated[tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow"], ...], Field(strict=False)] = Field(
        ("jsonl",), description="Experiment trackers to log to; metrics.jsonl is always written."
    )
    run_name: Text | None = Field(None, description="Run name in trackers; null: the folder name of output_dir.")


class ParallelSpec(Section):
    """Processes of a run, and how they share the model and the data."""

    num_processes: Literal["auto"] | PositiveInt = Field(
        "auto", description="Processes on this node; auto: one per visible GPU; ignored under torchrun and accelerate."
    )
    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"] = Field(
        "auto",
        description="single: one process; ddp: replicate the model; fsdp: shard it; auto: ddp if the model fits, else "
        "fsdp.",
    )
    dp_replicate_size: PositiveInt = Field(
        1, description="With fsdp: number of model replicas (HSDP), each sharded over an equal group of processes."
    )
    cp_size: PositiveInt = Field(
        1, description="With fsdp and packing: processes that split each row (context parallel)."
    )
    cpu_offload: Switch = Field(
        False,
        description="With fsdp: keep weights, gradients and optimizer states in host memory, and step on the CPU.",
    )
    timeout: PositiveInt = Field(
        60, description="Seconds to wait for a process within a step; saves and evaluations may take longer."
    )


class VisionSpec(Section):
    """Images of a vision-language model: their size, and which parts of the model train."""

    image_min_pixels: PositiveInt | None = Field(
        None, description="Qwen models: enlarge smaller images to this many pixels; null: the model's default."
    )
    image_max_pixels: PositiveInt = Field(
        1_003_520, description="Qwen models: shrink larger images to this many pixels (1280 tokens in Qwen2-VL)."
    )
    freeze_vision_tower: Switch = Field(True, description="Freeze the image encoder.")
    freeze_projector: Switch = Field(
        True, description="Freeze the layers that project image features into the language model."
    )
    freeze_language_model: Switch = Field(
        False, description="Freeze the language model, including its embeddings and output head."
    )


class ReportSpec(Section):
    """Measurements for the run's report."""

    warmup_steps: NonNegativeInt = Field(5, description="First steps to exclude from the throughput.")
    profile_steps: NonNegativeInt = Field(
        0, description="Steps to trace with torch.profiler after the warm-up, into output_dir/profile; 0: none."
    )
    memory_snapshot: Switch = Field(
        False, description="Write a GPU memory snapshot for pytorch.org/memory_viz into output_dir/profile."
    )
    mfu: Switch = Field(True, description="Report model FLOPs utilisation if the device's peak rate is known.")


@dataclass(frozen=True)
class Origin:
    """Source file and notices of a recipe. They do not count when recipes are compared."""

    source: Path | None = field(default=None, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)


class Recipe(Section):
    """A fine-tuning run of ligertune."""

    version: Literal[1] = Field(1, description="Version of the recipe format.")
    task: Literal["sft", "medusa"] = Field(
        "sft", description="sft: supervised fine-tuning; medusa: train Medusa heads for speculative decoding."
    )
    model: ModelSpec = Field(description="The model to train, and how to load it.")
    kernels: KernelsSpec = Field(KernelsSpec(), description="Which Triton kernels replace the model's layers.")
    method: MethodSpec = Field(MethodSpec(), description="Which weights train: all, an adapter, or some of them.")
    data: DataSpec = Field(description="Data sets, and how to format, tokenize, mask and batch them.")
    train: TrainSpec = Field(TrainSpec(), description="Batch size, number of steps, optimizer and memory savings.")
    eval: EvalSpec = Field(EvalSpec(), description="Evaluation on held-out data.")
    checkpoint: CheckpointSpec = Field(description="Output folder, checkpoints and resuming.")
    logging: LoggingSpec = Field(LoggingSpec(), description="Metrics that are logged during training.")
    parallel: ParallelSpec = Field(
        ParallelSpec(), description="Processes of a run, and how they share the model and the data."
    )
    vision: VisionSpec = Field(
        VisionSpec(), description="Images of a vision-language model: their size, and which parts of the model train."
    )
    report: ReportSpec = Field(ReportSpec(), description="Measurements for the run's report.")
    medusa: MedusaSpec = Field(MedusaSpec(), description="Medusa heads; read with task: medusa.")

    _origin: Origin = PrivateAttr(Origin())

    @property
    def source(self) -> Path | None:
        """Absolute path of the file that the recipe was read from; None for a recipe made in Python."""
        return self._origin.source

    @property
    def notices(self) -> tuple[str, ...]:
        """One line per alias, retired key or replaced value that the reader met."""
        return self._origin.notices


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
