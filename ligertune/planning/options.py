"""Options: the recipe's values that later stages read, as plain frozen dataclasses.

Code below `planning/` never sees the recipe. It receives these values, or the `Plan` that holds them. Field names and
meanings are those of the recipe's keys, whose reference is `ligertune recipe keys`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ligertune.recipe import Recipe, load_recipe

T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerOptions:
    """Tokenizer settings that differ from the model's."""

    path: str | None = None
    pad_token: str | None = None
    eos_token: str | None = None
    chat_template: str = "tokenizer"


@dataclass(frozen=True)
class ModelOptions:
    """Which model is loaded, and how."""

    model_name_or_path: str
    revision: str = "main"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    attn_implementation: str = "auto"
    init: Literal["pretrained", "random"] = "pretrained"
    num_hidden_layers: int | None = None
    trust_remote_code: bool = False
    tokenizer: TokenizerOptions = TokenizerOptions()


@dataclass(frozen=True)
class KernelOptions:
    """Which kernels are patched into the model."""

    enabled: Literal["auto"] | bool = "auto"
    rope: bool = True
    norm: bool = True
    mlp: bool = True
    loss: Literal["linear_cross_entropy", "cross_entropy", "torch"] = "linear_cross_entropy"
    attention: Literal["auto"] | bool = "auto"
    lora: bool = False
    optimizer: bool = False
    recompute: Literal["norms"] | bool = False

    @property
    def fuses_lora(self) -> bool:
        """Whether LoRA layers add their update inside the matrix multiplication."""
        return self.enabled is not False and self.lora

    @property
    def fuses_heads_loss(self) -> bool:
        """Whether the losses of Medusa heads are computed without their logits."""
        return self.enabled is not False and self.loss == "linear_cross_entropy"


@dataclass(frozen=True)
class MethodOptions:
    """Which parameters train."""

    type: Literal["full", "lora", "qlora", "freeze"] = "full"
    lora_r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    lora_modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    use_rslora: bool = False
    trainable: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetOptions:
    """One data set."""

    path: str
    name: str | None = None
    split: str = "train"
    format: str = "auto"
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    max_samples: int | None = None
    weight: float = 1.0
    on_bad_row: Literal["drop", "repair", "error"] = "drop"


@dataclass(frozen=True)
class DataOptions:
    """What the model learns from, and how it is rendered, masked and cut."""

    datasets: tuple[DatasetOptions, ...]
    val_split: float = 0.0
    eval_datasets: tuple[DatasetOptions, ...] = ()
    prompt_template: str = "auto"
    system_prompt: str | None = None
    train_on: Literal["assistant", "last", "all"] = "assistant"
    max_length: int = 2048
    on_overlength: Literal["drop", "truncate", "error"] = "drop"
    streaming: bool = False
    packing: bool = True
    padding_free: Literal["auto"] | bool = "auto"
    num_proc: Literal["auto"] | int = "auto"
    image_dir: str | None = None
    cache: bool = True


@dataclass(frozen=True)
class VisionOptions:
    """Image sizes, and which parts of a vision-language model train."""

    image_min_pixels: int | None = None
    image_max_pixels: int = 1_003_520
    freeze_vision_tower: bool = True
    freeze_projector: bool = True
    freeze_language_model: bool = False


@dataclass(frozen=True)
class MedusaOptions:
    """Medusa heads: their number and form, their loss, and how decoding with them is measured."""

    num_heads: int = 5
    num_layers: int = 1
    stage: Literal[1, 2] = 1
    lm_head: Literal["shared", "own"] = "shared"
    heads_path: str | None = None
    decay_coefficient: float = 0.8
    heads_coefficient: float = 0.2
    heads_warmup_ratio: float = 0.1
    self_distillation: bool = False
    expand_lm_head: bool = False
    tree_nodes: int = 64
    eval_prompts: int = 8
    eval_new_tokens: int = 128


@dataclass(frozen=True)
class ExecutionOptions:
    """How a step is executed."""

    torch_compile: bool = False
    cuda_graphs: bool = False
    fp8: bool = False
    full_determinism: bool = True
    gradient_checkpointing: Literal["offload", "offload_gate", "offload_both"] | bool = False

    @property
    def few_shapes(self) -> bool:
        """Whether every new batch shape costs a graph, of torch.compile or of CUDA."""
        return self.torch_compile or self.cuda_graphs


RowKind = Literal["packed", "grouped", "shuffled"]
MAX_COMPILED_LENGTHS = 8  # torch.compile and CUDA graphs make one graph per length


@dataclass(frozen=True)
class BatchLayoutOptions:
    """What decides whether examples share a row, and which attention keeps them apart."""

    kind: RowKind  # packs of examples, or single examples that are grouped by length or shuffled
    max_length: int
    attn_implementation: str
    kernels_enabled: bool
    document_attention: Literal["auto"] | bool  # whether our attention kernel may run, or must
    padding_free: Literal["auto"] | bool
    micro_batch_size: Literal["auto"] | int
    few_shapes: bool  # every new batch shape costs a graph
    cp_size: int

    @property
    def packing(self) -> bool:
        return self.kind == "packed"

    @staticmethod
    def of(recipe: Recipe) -> BatchLayoutOptions:
        """Copy the values out of a recipe."""
        kernels, train, data = recipe.kernels, recipe.train, recipe.data
        enabled = kernels.enabled is not False
        # Compiled layers with our attention were not measured, so `auto` leaves it out there.
        allowed = enabled and not (kernels.attention == "auto" and train.torch_compile)
        return BatchLayoutOptions(
            kind="packed" if data.packing else "grouped" if train.group_by_length else "shuffled",
            max_length=data.max_length,
            attn_implementation=recipe.model.attn_implementation,
            kernels_enabled=enabled,
            document_attention=kernels.attention if allowed else False,
            padding_free=data.padding_free,
            micro_batch_size=train.per_device_train_batch_size,
            few_shapes=train.few_shapes,
            cp_size=recipe.parallel.cp_size,
        )

    def length_multiple(self, attention_multiple: int) -> int:
        """Return the number to a multiple of which batches are padded. attention_multiple: what attention requires.

        torch.compile and CUDA graphs make one graph per length, and each takes minutes with torch 2.11. So packed rows
        get one length (`data.batching` pads them to it), and other rows at most eight.
        """
        multiple = attention_multiple * self.cp_size
        if not self.few_shapes:
            return multiple
        step = self.max_length if self.packing else -(-self.max_length // MAX_COMPILED_LENGTHS)
        return -(-step // multiple) * multiple


@dataclass(frozen=True)
class ParallelOptions:
    """How several processes share the work."""

    dp_replicate_size: int = 1
    cpu_offload: bool = False
    timeout: int = 60  # seconds


@dataclass(frozen=True)
class CheckpointOptions:
    """Where the run is kept, and how it is continued."""

    output_dir: str
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    save_total_limit: int = 2
    async_save: bool = False
    save_model: bool = True
    resume_from_checkpoint: str = "never"
    load_best_model_at_end: bool = False
    overwrite: bool = False
    save_on_signal: bool = True


@dataclass(frozen=True)
class EvaluationOptions:
    """What follows an evaluation."""

    early_stopping_patience: int | None = None
    sample_prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoggingOptions:
    """What is logged, and where."""

    logging_steps: int = 10
    report_to: tuple[str, ...] = ("jsonl",)
    run_name: str | None = None


@dataclass(frozen=True)
class MeasurementOptions:
    """What the report measures."""

    warmup_steps: int = 5
    profile_steps: int = 0
    memory_snapshot: bool = False
    mfu: bool = True


@dataclass(frozen=True)
class BuildOptions:
    """Everything that decides which model is built, and what is patched into it."""

    task: Literal["sft", "medusa"]
    seed: int
    model: ModelOptions
    method: MethodOptions
    kernels: KernelOptions
    vision: VisionOptions
    medusa: MedusaOptions
    execution: ExecutionOptions


@dataclass(frozen=True)
class RunOptions:
    """The options of a whole run, read from a recipe."""

    build: BuildOptions
    data: DataOptions
    layout: BatchLayoutOptions
    parallel: ParallelOptions
    checkpoint: CheckpointOptions
    evaluation: EvaluationOptions
    logging: LoggingOptions
    measurement: MeasurementOptions

    @staticmethod
    def of(recipe: Recipe) -> RunOptions:
        """Copy the values out of a recipe."""
        return RunOptions(
            build=BuildOptions(
                task=recipe.task,
                seed=recipe.train.seed,
                model=options_from(recipe.model, ModelOptions),
                method=options_from(recipe.method, MethodOptions),
                kernels=options_from(recipe.kernels, KernelOptions),
                vision=options_from(recipe.vision, VisionOptions),
                medusa=options_from(recipe.medusa, MedusaOptions),
                execution=options_from(recipe.train, ExecutionOptions),
            ),
            data=options_from(recipe.data, DataOptions),
            layout=BatchLayoutOptions.of(recipe),
            parallel=options_from(recipe.parallel, ParallelOptions),
            checkpoint=options_from(recipe.checkpoint, CheckpointOptions),
            evaluation=options_from(recipe.eval, EvaluationOptions),
            logging=options_from(recipe.logging, LoggingOptions),
            measurement=options_from(recipe.report, MeasurementOptions),
        )


def options_from(section: typing.Any, options: type[T]) -> T:
    """Copy the fields of `options` from a section of the recipe; sections inside it become their options, too."""
    nested = {"tokenizer": TokenizerOptions, "datasets": DatasetOptions, "eval_datasets": DatasetOptions}

    def value(name: str) -> typing.Any:
        found = getattr(section, name)
        if name not in nested:
            return found
        convert = functools.partial(options_from, options=nested[name])
        return tuple(map(convert, found)) if isinstance(found, tuple) else convert(found)

    return options(**{field.name: value(field.name) for field in dataclasses.fields(options)})


def saved_options(folder: Path) -> RunOptions | None:
    """Return the options of the run in `folder`, or of the run with this `model` folder; None without a recipe."""
    for place in (folder, folder.parent):
        if (place / "resolved_recipe.yaml").is_file():
            return RunOptions.of(load_recipe(place / "resolved_recipe.yaml"))
    return None
