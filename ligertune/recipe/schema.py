"""Schema of the recipe: every section except those in train_sections.py, with keys, types, defaults and bounds.

`ligertune recipe keys`, `recipe schema`, `init` and the error messages are made from these definitions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    create_model,
)

from ligertune.files.base_model import StoredAs
from ligertune.recipe.feature import feature_parts, modality_parts
from ligertune.recipe.section import (
    AutoSwitch,
    Expression,
    ExpressionList,
    FileOrHub,
    LayerNumbers,
    ModuleNames,
    NameList,
    ReadName,
    RoleList,
    Section,
    Share,
    ShareBelowOne,
    Switch,
    SwitchOrLayers,
    Template,
    TemplateVariables,
    Text,
    convert_by,
    unusable,
)
from ligertune.recipe.train_sections import CheckpointSpec, EvalSpec, TrainSpec

SectionT = TypeVar("SectionT", bound=Section)


class TokenizerSpec(Section):
    """Tokenizer settings that differ from the model's."""

    path: FileOrHub | None = None
    """Hub id or folder of another tokenizer; null: the model's."""
    pad_token: Text | None = None
    """Padding token; null: the tokenizer's, or one that is not the EOS token."""
    eos_token: Text | None = None
    """End-of-sequence token; null: the tokenizer's."""
    add_tokens: NameList = ()
    """Tokens to add; they are found in the data's text. The embedding grows if it has no rows for them."""
    add_special_tokens: NameList = ()
    """Special tokens to add, which only chat templates write: their names in the data stay text."""
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Multiple to which the rows of an embedding that grows are rounded up, such as 64; null: no rounding."""
    mean_resizing: Switch = True
    """Draw new rows around the mean of the old ones, as transformers does; false: as the model initialises weights."""
    chat_template: Template = "tokenizer"
    """Chat template: tokenizer (its own), a built-in name such as chatml or llama3, or a Jinja file."""

    @property
    def adds(self) -> bool:
        """Whether tokens are added to the vocabulary."""
        return bool(self.add_tokens or self.add_special_tokens)


class RopeParametersSpec(Section):
    """Rotary position embeddings that differ from the model's, as in transformers; the saved model has them."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] | None = None
    """How angles are scaled for longer texts; null: the model's."""
    factor: Annotated[float, Field(ge=1.0, le=1e4)] | None = None
    """How many times as long texts may be; all types but default."""
    original_max_position_embeddings: PositiveInt | None = None
    """yarn, llama3: length without the scaling; null: that of the model."""
    rope_theta: PositiveFloat | None = None
    """Base of the angles; null: the model's."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths above the length divided by this are scaled in full; null: the model's, or 1."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths below the length divided by this are not scaled; null: the model's, or 4."""
    beta_fast: PositiveFloat | None = None
    """yarn: rotations within the length from which angles are not scaled; null: the model's, or 32."""
    beta_slow: PositiveFloat | None = None
    """yarn: rotations within the length up to which angles are scaled in full; null: the model's, or 1."""
    attention_factor: PositiveFloat | None = None
    """yarn: what the embeddings are multiplied by; null: the model's, or computed from the factor."""


class ModelSpec(Section):
    """The model to train, and how to load it."""

    model_name_or_path: FileOrHub
    """Hub id or folder of the model."""
    revision: Text = "main"
    """Branch, tag or commit of the model on the hub."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the weights; float16: mixed precision with loss scaling; auto: bfloat16 if supported."""
    attn_implementation: Literal[
        "auto", "varlen", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_4", "eager"
    ] = "auto"
    """Attention; varlen: torch's flash attention of packed documents; auto: an exact one that is supported."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Load pretrained weights, or initialise random ones (for benchmarks and tests)."""
    num_hidden_layers: PositiveInt | None = None
    """With init: random: number of layers to build; null: all."""
    trust_remote_code: Switch = False
    """Run model code that comes with the checkpoint."""
    rope_parameters: RopeParametersSpec = RopeParametersSpec()
    tokenizer: TokenizerSpec = TokenizerSpec()


class KernelsSpec(Section):
    """Which Triton kernels replace the model's layers."""

    enabled: AutoSwitch = "auto"
    """Use the kernels; auto: where the device runs Triton and a layer is recognised."""
    rope: Switch = True
    """Use the kernel for rotary position embeddings."""
    norm: Switch = True
    """Use the kernels for RMSNorm and LayerNorm."""
    mlp: Switch = True
    """Use the kernels for SwiGLU, GeGLU and the experts of a mixture."""
    mixer: Switch = True
    """Use the kernels for recurrences of hybrid models, and the convolution in front of them."""
    loss: Literal["linear_cross_entropy", "cross_entropy", "torch"] = "linear_cross_entropy"
    """Loss; linear_cross_entropy: never stores the logits; cross_entropy: on stored logits; torch: PyTorch's."""
    attention: AutoSwitch = "auto"
    """Attention kernel for packed documents; auto: in half precision on sm90 (H100, H200), where it is faster."""
    lora: AutoSwitch = "auto"
    """Fuse the LoRA update into matrix multiplications; auto: on sm90 (H100, H200) without dropout: it is faster."""
    optimizer: AutoSwitch = "auto"
    """Use the AdamW kernel for adamw_torch_fused; auto: for large weights on sm90 (H100, H200), where it is faster."""
    recompute: SwitchOrLayers = "auto"
    """Recompute norms and gated products in the backward; norms, mlps: one of them; auto: both with fused LoRA."""

    @property
    def fuses_lora(self) -> bool:
        """Whether LoRA layers add their update inside the matrix multiplication."""
        return self.enabled is not False and self.lora is True  # the plan has replaced auto

    @property
    def recomputed(self) -> Literal["norms", "mlps"] | bool:
        """What the backward recomputes, once the plan has replaced auto."""
        return False if self.recompute == "auto" else self.recompute

    @property
    def fuses_heads_loss(self) -> bool:
        """Whether the losses of added heads are computed without their logits."""
        return self.enabled is not False and self.loss == "linear_cross_entropy"


class MethodSpec(Section):
    """Which weights train: all, an adapter, or some of them."""

    # LoRA (Hu et al. 2021): W x + (lora_alpha / lora_r) B A x with frozen W, A: (R, E), B: (E, R)

    type: Literal["full", "lora", "qlora", "freeze"] = "full"
    """full: all weights; lora: an adapter; qlora: an adapter on 4-bit weights; freeze: parameters of `trainable`."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """With type: qlora: values of 4 bits; nf4: quantiles of a normal distribution; fp4: floating-point numbers."""
    bnb_4bit_use_double_quant: Switch = True
    """With type: qlora: store the weights' scales in 8 bits, too; false: in float32, 0.37 more bits per weight."""
    bnb_4bit_quant_storage: Literal["uint8", "bfloat16", "float16", "float32"] = "uint8"
    """With type: qlora: dtype that holds the 4-bit weights' bytes; parallel.strategy: fsdp shards all but uint8."""
    load_in_8bit: Switch = False
    """With type: lora: store the linear weights of the layers in 8 bits (LLM.int8); needs bitsandbytes."""
    lora_r: Annotated[int, Field(ge=1, le=2**16)] = 16
    """LoRA rank R."""
    lora_alpha: PositiveFloat = 32.0
    """LoRA scale; the update is multiplied by lora_alpha / lora_r."""
    lora_dropout: ShareBelowOne = 0.0
    """Dropout probability of the adapter's input, in layers; experts have none."""
    lora_target_modules: Literal["all-linear"] | Expression | NameList = "all-linear"
    """Layers to adapt: all-linear (but head, routers, what PEFT refuses), names, or an expression of whole names."""
    layers_to_transform: LayerNumbers = ()
    """Numbers of the layers that get an adapter, from 0, as in PEFT; none: all."""
    layers_pattern: ModuleNames = ()
    """With layers_to_transform: names of the lists of layers that are numbered, such as layers; none: any."""
    lora_target_parameters: NameList | None = None
    """Weights to adapt that are not layers, such as mlp.experts.down_proj; null: with all-linear, all experts'."""
    lora_modules_to_save: NameList = ()
    """Layers to train in full in addition to the adapter, such as lm_head."""
    init_lora_weights: Annotated[
        Literal["default", "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_4", "pissa_niter_16", "loftq"],
        BeforeValidator(convert_by({True: "default"})),
    ] = "default"
    """Initial adapter, as in PEFT; olora, pissa: by QR or SVD; loftq: error of 4-bit weights; niter: a fast SVD."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1.0, le=1e4)] | None = None
    """LoRA+: learning rate of B and of one-dimensional parameters, relative to train.learning_rate; null: the same."""
    loraplus_lr_embedding: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    """With loraplus_lr_ratio: learning rate of adapters on embeddings."""
    trainable_token_indices: Annotated[tuple[NonNegativeInt | Text, ...], Field(strict=False)] = ()
    """Tokens (texts or ids) whose rows of embedding and output head train next to the adapter."""
    use_dora: Switch = False
    """Use DoRA: train the magnitude of each weight and its direction."""
    use_rslora: Switch = False
    """Use rsLoRA: divide lora_alpha by the square root of lora_r."""
    trainable: ExpressionList = ()
    """With type: freeze: regular expressions; parameters whose names match one of them train."""

    @property
    def stored_as(self) -> StoredAs | None:
        """How bitsandbytes stores the frozen linear weights; None: as they are."""
        if self.type != "qlora":
            return "int8" if self.load_in_8bit else None
        if self.bnb_4bit_quant_type == "nf4":
            return "nf4" if self.bnb_4bit_use_double_quant else "nf4_single"
        return "fp4" if self.bnb_4bit_use_double_quant else "fp4_single"

    @property
    def init_from_weights(self) -> bool:
        """Whether the initial adapter is made from the weights, and is not zero (PiSSA, OLoRA, LoftQ)."""
        return self.init_lora_weights.startswith(("pissa", "olora", "loftq"))

    @property
    def residual_of(self) -> str | None:
        """The init_lora_weights whose adapter is subtracted from the weights before they are stored in 4 bits."""
        is_subtracted = self.type == "qlora" and self.init_lora_weights.startswith(("pissa", "olora"))
        return self.init_lora_weights if is_subtracted else None


class DatasetSpec(Section):
    """A data set: where it is, its format, and how much of it to use."""

    path: FileOrHub
    """Hub id, file, folder or glob; json, jsonl, parquet, arrow, csv, tsv, txt or md, also .gz or .zst."""
    name: Text | None = None
    """Configuration (subset) of a hub data set."""
    split: Text = "train"
    """Split of a hub data set, or of a folder whose files are named by splits; or a slice: train[:90%]."""
    data_dir: Text | None = None
    """Subfolder of a folder or hub data set, in place of the whole."""
    data_files: NameList = ()
    """Files of a folder or hub data set, as paths or globs inside it; none: those of the split."""
    revision: Text | None = None
    """Branch, tag or commit of a hub data set; null: its newest."""
    format: Literal[
        "auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text", "llava",
        "question_answer", "dialogue", "oasst", "tokenized",
        "prompt_pairs", "question_pairs", "alpaca_pairs", "sharegpt_pairs", "messages_pairs", "pairs",
        "text_label", "texts_label", "messages_label",
    ] = "auto"  # fmt: skip
    """Row format; auto: recognised by the columns. Names with pairs: task dpo or reward; with label: classification."""
    columns: dict[str, str] = Field({})
    """Columns to rename, as {expected: actual}; an actual name may be nested: data.answers.0."""
    max_samples: PositiveInt | None = None
    """Maximum number of rows to read; null: all."""
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """How often an epoch repeats the data set; 0.5: a random half, drawn with train.seed."""
    on_bad_row: Literal["drop", "repair", "error"] = "drop"
    """Unusable rows; drop: drop and count them; repair: fix what can be fixed, drop the rest; error: stop."""


def _probabilities(given: Any) -> Any:
    """Return probabilities that are above 0 and add up to 1; another value as it is."""
    if not isinstance(given, tuple):
        return given
    if min(given) <= 0:
        raise unusable(f"holds {min(given):g}, and each probability is above 0.")
    if abs(sum(given) - 1) > 1e-6:  # of numbers that are written with six digits
        raise unusable(f"adds up to {sum(given):.6g}, and probabilities add up to 1.")
    return given


Probabilities = Annotated[
    Literal["round_robin"] | Annotated[tuple[float, ...], Field(strict=False, min_length=1)] | None,
    AfterValidator(_probabilities),
]


class InterleaveSpec(Section):
    """Draw each next example from one of several data sets, as datasets.interleave_datasets does."""

    probabilities: Probabilities = None
    """Probability of each data set; round_robin: one example of each in turn; null: each as often as its weight."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """When an epoch ends: once the first data set has been read, or once all have been read at least once."""


class DataSpec(Section):
    """Data sets, and how to format, tokenize, mask and batch them."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(strict=False, min_length=1)]
    """Data sets to train on; each needs a path."""
    interleave: InterleaveSpec = InterleaveSpec()
    val_split: ShareBelowOne = 0.0
    """Share of the examples to hold out for evaluation."""
    eval_datasets: Annotated[tuple[DatasetSpec, ...], Field(strict=False)] = ()
    """Data sets to evaluate on, instead of val_split."""
    prompt_template: Template = "auto"
    """Prompt format: auto, chat (the tokenizer's chat template), alpaca, a built-in name such as chatml, or a file."""
    system_prompt: str | None = None
    """System prompt for conversations without one."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens with labels: all assistant turns, the last assistant turn, or all tokens."""
    roles_to_train: RoleList = ("assistant",)
    """With train_on: assistant: roles whose turns have labels."""
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    """End-of-turn tokens with labels: those of turns with labels, the conversation's last one, all, or none."""
    mask_reasoning: Switch = False
    """Give the reasoning of trained answers no labels: the field, or a <think> block that begins the text."""
    drop_history_reasoning: Switch = False
    """Remove the reasoning of answers before the last question, before the template is rendered."""
    chat_template_kwargs: TemplateVariables = Field({})
    """Variables for the chat template, such as {enable_thinking: false}; the column of this name wins."""
    # from 2 on, because the first token of an example is never predicted
    max_length: Annotated[int, Field(ge=2, le=2**24)] = 2048
    """Maximum length of an example, in tokens."""
    on_overlength: Literal["drop", "truncate", "error"] = "drop"
    """Examples longer than max_length: drop, truncate, or stop; their number is reported."""
    max_record_bytes: Annotated[int, Field(ge=1, le=2**30)] = 2**24
    """Largest record, in bytes: a larger one is dropped without being read."""
    max_dropped: Share = 0.5
    """Largest share of a data set's rows that may be dropped; a run that would drop more is refused."""
    streaming: Switch = False
    """Read and shuffle the data during training, in bounded memory; needs train.max_steps."""
    packing: AutoSwitch = "auto"
    """Pack several examples into each row of max_length tokens; auto: unless the model would let them see others."""
    padding_free: AutoSwitch = "auto"
    """Without packing: flatten a batch into one row instead of padding it; auto: if the attention supports it."""
    num_proc: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Processes that prepare the data; auto: one per CPU core."""
    image_dir: FileOrHub | None = None
    """Folder of relative image paths; null: the folder of the data file."""
    cache: Switch = True
    """Cache the prepared data in the user's cache folder, or in $LIGERTUNE_CACHE."""


class LoggingSpec(Section):
    """Metrics that are logged during training."""

    logging_steps: PositiveInt = 10
    """Steps between lines of metrics.jsonl."""
    report_to: Annotated[
        tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet_ml"], ...],
        ReadName,
        Field(strict=False),
    ] = ("jsonl",)
    """Experiment trackers to log to; metrics.jsonl is always written."""
    run_name: Text | None = None
    """Run name in trackers; null: the folder name of output_dir."""


class ParallelSpec(Section):
    """Processes of a run, and how they share the model and the data."""

    num_processes: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Processes on this node; auto: one per visible GPU, or as many as torchrun or accelerate started."""
    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"] = "auto"
    """single: one process; ddp: replicate the model; fsdp: shard it; auto: the fastest that fits."""
    reshard_after_forward: AutoSwitch = "auto"
    """With fsdp: free a layer's gathered weights after its forward, and gather them again for its backward."""
    dp_replicate_size: PositiveInt = 1
    """With fsdp: number of model replicas (HSDP), each sharded over an equal group of processes."""
    cp_size: PositiveInt = 1
    """With fsdp and packing: processes that split each row (context parallel)."""
    cpu_offload: Switch = False
    """With fsdp: keep weights, gradients and optimizer states in host memory, and step on the CPU."""
    timeout: Annotated[int, Field(ge=1, le=10**7)] = 60
    """Seconds to wait for a process within a step; saves and evaluations may take longer."""


class ReportSpec(Section):
    """Measurements for the run's report."""

    warmup_steps: NonNegativeInt = 5
    """First steps to exclude from the throughput."""
    profile_steps: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Steps to trace with torch.profiler after the warm-up, into output_dir/profile; 0: none."""
    memory_snapshot: Switch = False
    """Write a GPU memory snapshot for pytorch.org/memory_viz into output_dir/profile."""
    mfu: Switch = True
    """Report model FLOPs utilisation if the device's peak rate is known."""


@dataclass(frozen=True)
class Origin:
    """Source file and notices of a recipe. They do not count when recipes are compared."""

    source: Path | None = field(default=None, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)


# value of `task` -> words for the key reference
TASKS = {task: words for part in feature_parts() for task, words in part.tasks.items()}
if TYPE_CHECKING:  # type checkers cannot read a Literal whose words are computed
    TaskName = str
else:
    TaskName = Literal[tuple(TASKS)]
TASK_WORDS = "; ".join(f"{task}: {words}" if words else task for task, words in TASKS.items()) + "."


class CommonSections(Section):
    """The sections of a recipe that come before those of modalities."""

    version: Literal[1] = 1
    """Version of the recipe format."""
    task: Annotated[TaskName, Field(description=TASK_WORDS)] = "sft"
    # each section's description is the docstring of its class
    model: ModelSpec
    kernels: KernelsSpec = KernelsSpec()
    method: MethodSpec = MethodSpec()
    data: DataSpec
    train: TrainSpec = TrainSpec()
    eval: EvalSpec = EvalSpec()
    checkpoint: CheckpointSpec
    logging: LoggingSpec = LoggingSpec()
    parallel: ParallelSpec = ParallelSpec()


# A base class, so that the sections of modalities keep their place in the key reference.
if TYPE_CHECKING:
    SectionsWithModalities = CommonSections
else:
    SectionsWithModalities = create_model(
        "SectionsWithModalities",
        __base__=CommonSections,
        __module__=__name__,
        **{name: (kind, kind()) for part in modality_parts() for name, kind in part.sections.items()},
    )


class Recipe(SectionsWithModalities):
    """A fine-tuning run of ligertune."""

    report: ReportSpec = ReportSpec()

    _origin: Origin = PrivateAttr(Origin())

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the section of this class, which a feature or modality has added."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return next(value for value in values if isinstance(value, kind))

    @property
    def source(self) -> Path | None:
        """Absolute path of the file that the recipe was read from; None for a recipe made in Python."""
        return self._origin.source

    @property
    def notices(self) -> tuple[str, ...]:
        """One line per alias, retired key or replaced value that the reader met."""
        return self._origin.notices


if not TYPE_CHECKING:
    # type checkers see the class above, and `Recipe.section` for the sections of features
    Recipe = create_model(
        "Recipe",
        __base__=Recipe,
        __doc__=Recipe.__doc__,
        __module__=__name__,
        **{name: (kind, kind()) for part in feature_parts() for name, kind in part.sections.items()},
    )


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
