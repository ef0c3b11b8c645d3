"""The recipe's sections, their keys, defaults and bounds: a key is declared here, or in `medusa`, and nowhere else."""

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
    """The tokenizer, where it is not simply the model's own."""

    path: FileOrHub | None = Field(None, description="Hub id or folder of another tokenizer; null: the model's own.")
    pad_token: Text | None = Field(None, description="Padding token; null: the tokenizer's, or one that hides no EOS.")
    eos_token: Text | None = Field(None, description="End-of-text token; null: the tokenizer's.")
    chat_template: Template = Field(
        "tokenizer", description="Chat template: tokenizer (its own), a built-in name, or a jinja file."
    )


class ModelSpec(Section):
    """Which model is trained, and how it is loaded."""

    model_name_or_path: FileOrHub = Field(description="Hub id or folder of the model.")
    revision: Text = Field("main", description="Branch, tag or commit on the hub.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Dtype of the run. float16 is mixed precision with a scaled loss; auto asks the device."
    )
    attn_implementation: Literal["auto", "varlen", "sdpa", "flex_attention", "flash_attention_2", "eager"] = Field(
        "auto",
        description="varlen is torch's flash attention over packed documents; auto takes an exact one that fits.",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="pretrained weights, or random ones from the configuration (benchmarks, tests)."
    )
    num_hidden_layers: PositiveInt | None = Field(
        None, description="Cut the model to this depth; with init: random only."
    )
    trust_remote_code: Switch = Field(False, description="Run modelling code that comes with the checkpoint.")
    tokenizer: TokenizerSpec = Field(TokenizerSpec(), description="Tokenizer settings that differ from the model's.")


class KernelsSpec(Section):
    """Which of our kernels are patched in."""

    enabled: AutoSwitch = Field("auto", description="true, false, or auto: wherever they run and are recognised.")
    rope: Switch = Field(True, description="Rotary position embedding.")
    norm: Switch = Field(True, description="RMSNorm and LayerNorm.")
    mlp: Switch = Field(True, description="SwiGLU or GeGLU, as the model has it.")
    loss: Literal["linear_cross_entropy", "cross_entropy", "torch"] = Field(
        "linear_cross_entropy",
        description="linear_cross_entropy never makes the logits; cross_entropy reads them; torch is torch's own.",
    )
    attention: AutoSwitch = Field(
        "auto",
        description="Attention over the documents of a row; auto: in half precision, where it was timed (sm90).",
    )
    lora: Switch = Field(False, description="Add an adapter's term in its products, not by passes over their output.")
    optimizer: Switch = Field(False, description="The step of train.optim: adamw_torch_fused, clipping included.")
    recompute: SwitchOrNorms = Field(
        False,
        description="Make norm outputs and gated activations again in the backward instead of keeping them: "
        "less memory for some time, the same bits. norms: norm outputs only.",
    )


class MethodSpec(Section):
    """What is trained. LoRA: W x + (lora_alpha / lora_r) B A x with W frozen.  A: (R, E), B: (E, R)."""

    type: Literal["full", "lora", "qlora", "freeze"] = Field(
        "full", description="All weights, a low-rank adapter, one on 4-bit weights, or the parameters of `trainable`."
    )
    lora_r: PositiveInt = Field(16, description="Inner width R of the update.")
    lora_alpha: PositiveFloat = Field(32.0, description="Scale of the update, before it is divided by lora_r.")
    lora_dropout: ShareBelowOne = Field(0.0, description="Share of the adapter's inputs that training drops.")
    lora_target_modules: Literal["all-linear"] | NameList = Field(
        "all-linear", description="Layers that get an adapter: all-linear (all but the head), or a list of their names."
    )
    lora_modules_to_save: NameList = Field((), description="Layers trained whole beside the adapter, such as lm_head.")
    use_dora: Switch = Field(False, description="Train each weight's magnitude apart from its direction (DoRA).")
    use_rslora: Switch = Field(False, description="Divide lora_alpha by the root of lora_r instead of by lora_r.")
    trainable: NameList = Field(
        (), description="With freeze: regular expressions; a parameter trains if one is found in its name."
    )


class DatasetSpec(Section):
    """One data set."""

    path: FileOrHub = Field(description="Hub id, file, folder or glob; json, jsonl, parquet, csv or txt, also .gz.")
    name: Text | None = Field(None, description="Configuration (subset) of a data set on the hub.")
    split: Text = Field("train", description="Split of a data set on the hub.")
    format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text", "llava"] = Field(
        "auto", description="Layout of a row; auto looks at its columns."
    )
    columns: dict[str, str] = Field({}, description="Rename columns: {expected: actual}.")
    max_samples: PositiveInt | None = Field(None, description="Read at most this many rows; null: all.")
    weight: PositiveFloat = Field(
        1.0, description="Times that an epoch sees the data set; 0.5 is a half, drawn by seed."
    )
    on_bad_row: Literal["drop", "repair", "error"] = Field(
        "drop", description="drop: count a row that cannot be used; repair: mend what can be mended; error: stop at it."
    )


class DataSpec(Section):
    """What the model learns from, and how it is rendered, masked and cut."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(strict=False, min_length=1)] = Field(
        description="The data sets to train on; each needs a path."
    )
    val_split: ShareBelowOne = Field(0.0, description="Share of the examples held out for evaluation.")
    eval_datasets: Annotated[tuple[DatasetSpec, ...], Field(strict=False)] = Field(
        (), description="Data sets to evaluate on, instead of val_split."
    )
    prompt_template: Template = Field(
        "auto", description="auto, chat (the tokenizer's), alpaca, or a jinja file that renders a row."
    )
    system_prompt: str | None = Field(None, description="System prompt of conversations that have none.")
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant", description="Which tokens are trained: the assistant's turns, the last of them, or all."
    )
    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="Longest example, in tokens.")
    on_overlength: Literal["drop", "truncate", "error"] = Field(
        "drop", description="What becomes of longer examples; how many there were is always reported."
    )
    streaming: Switch = Field(
        False, description="Read while training, in little memory, shuffled through a buffer; needs train.max_steps."
    )
    packing: Switch = Field(
        True, description="Put examples into rows of max_length; they never see each other. A batch counts rows."
    )
    padding_free: AutoSwitch = Field(
        "auto",
        description="Without packing: lay the examples of a batch one behind another instead of padding them; "
        "auto: where our kernels run and one launch of attention keeps them apart.",
    )
    num_proc: Literal["auto"] | PositiveInt = Field(
        "auto", description="Processes that prepare the data; auto: one for each core."
    )
    image_dir: FileOrHub | None = Field(
        None, description="Folder that relative paths of images start from; null: that of the data file."
    )
    cache: Switch = Field(
        True, description="Keep prepared data in the user's cache ($LIGERTUNE_CACHE), by content; ranks share it."
    )


class LoggingSpec(Section):
    """What the run writes down while it trains."""

    logging_steps: PositiveInt = Field(10, description="Steps between lines of metrics.jsonl.")
    report_to: Annotated[tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow"], ...], Field(strict=False)] = Field(
        ("jsonl",), description="Trackers that get each line, too; metrics.jsonl is always written."
    )
    run_name: Text | None = Field(None, description="Name of the run in trackers; null: the name of output_dir.")


class ParallelSpec(Section):
    """How a run with several processes shares the work."""

    num_processes: Literal["auto"] | PositiveInt = Field(
        "auto", description="Processes on this node; auto: one for each visible GPU. A launcher's are joined."
    )
    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"] = Field(
        "auto",
        description="single: one process; ddp: each holds all; fsdp: they share; auto: ddp where that fits, else fsdp.",
    )
    dp_replicate_size: PositiveInt = Field(
        1, description="fsdp: copies of the model (HSDP), each shared by as many processes; 1: all share one."
    )
    cp_size: PositiveInt = Field(
        1,
        description="fsdp: processes that share each row (context parallel), for rows too long for one; needs packing.",
    )
    cpu_offload: Switch = Field(
        False, description="fsdp: keep weights, gradients and optimizer states in host memory; the step is taken there."
    )
    timeout: PositiveInt = Field(
        60, description="Seconds to wait for a process in a step, more in saves and evaluations; if stopped, anywhere."
    )


class VisionSpec(Section):
    """How a vision-language model sees, and which of its parts train; nothing for a model of text."""

    image_min_pixels: PositiveInt | None = Field(
        None, description="Smaller images are enlarged to this many pixels; null: the model's own. Qwen family."
    )
    image_max_pixels: PositiveInt = Field(
        1_003_520, description="Larger images are reduced to this many pixels (1280 tokens of Qwen2-VL). Qwen family."
    )
    freeze_vision_tower: Switch = Field(True, description="Keep the image encoder as it is.")
    freeze_projector: Switch = Field(True, description="Keep what turns its output into the language model's input.")
    freeze_language_model: Switch = Field(False, description="Keep the language model, its embeddings and its head.")


class ReportSpec(Section):
    """What the report measures."""

    warmup_steps: NonNegativeInt = Field(5, description="First steps that throughput leaves out.")
    profile_steps: NonNegativeInt = Field(
        0, description="Steps of a torch profiler trace after the warm-up, left in output_dir/profile; 0: none."
    )
    memory_snapshot: Switch = Field(
        False, description="Leave a snapshot of the GPU's memory, for pytorch.org/memory_viz, in output_dir/profile."
    )
    mfu: Switch = Field(True, description="Report model FLOPs utilisation where the device's peak is known.")


@dataclass(frozen=True)
class Origin:
    """Where a recipe came from. Recipes that say the same are equal, wherever they were read."""

    source: Path | None = field(default=None, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)


class Recipe(Section):
    """A fine-tuning run of ligertune."""

    version: Literal[1] = Field(1, description="Version of the recipe's language.")
    task: Literal["sft", "medusa"] = Field("sft", description="sft: supervised fine-tuning; medusa: decoding heads.")
    model: ModelSpec = Field(description="Which model is trained, and how it is loaded.")
    kernels: KernelsSpec = Field(KernelsSpec(), description="Which kernels are patched in.")
    method: MethodSpec = Field(MethodSpec(), description="What is trained: all weights, an adapter, or some of them.")
    data: DataSpec = Field(description="What the model learns from.")
    train: TrainSpec = Field(TrainSpec(), description="Batches, steps and the optimizer.")
    eval: EvalSpec = Field(EvalSpec(), description="When the loss on held-out data is measured.")
    checkpoint: CheckpointSpec = Field(description="Where the run is kept, and how it is continued.")
    logging: LoggingSpec = Field(LoggingSpec(), description="What the run writes down while it trains.")
    parallel: ParallelSpec = Field(ParallelSpec(), description="How several processes share the work.")
    vision: VisionSpec = Field(VisionSpec(), description="Images: their size, and which parts of the model train.")
    report: ReportSpec = Field(ReportSpec(), description="What the report measures.")
    medusa: MedusaSpec = Field(MedusaSpec(), description="Heads that guess several tokens ahead; with task: medusa.")

    _origin: Origin = PrivateAttr(Origin())

    @property
    def source(self) -> Path | None:
        """The file it was read from, absolute; None for one made in Python."""
        return self._origin.source

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each thing that the reader took to mean another."""
        return self._origin.notices


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
