"""Schema of the recipe sections `train`, `eval`, `checkpoint` and `medusa`: keys, types, defaults and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.section import (
    AutoSwitch,
    Expression,
    FileOrHub,
    NameList,
    OutputPath,
    Resume,
    Section,
    Share,
    ShareBelowOne,
    StepsOrShare,
    Switch,
    SwitchOrOffload,
    Text,
    TiledSwitch,
    When,
    unusable,
)

# Keys of `train` with a default, and the key that replaces each if it is given.
EITHER_OR = {
    "num_train_epochs": "max_steps",
    "gradient_accumulation_steps": "global_batch_size",
    "warmup_ratio": "warmup_steps",
}


# Far above the batches that are trained with, and low enough for the list of a step's rows: the largest published
# batches have some 10,000 rows. `make_plan` also compares a step with the data set.
RowCount = Annotated[int, Field(ge=1, le=2**16)]
MAX_ROWS_OF_A_STEP = 2**20

_NUMBER = (int, float)
_WHOLE = (int,)
_RISE = ("linear", "cosine", "1-sqrt")
_MIN_LR = {"num_cycles": _NUMBER, "min_lr": _NUMBER, "min_lr_rate": _NUMBER}
_BY_LOSS = {"factor": _NUMBER, "patience": _WHOLE, "threshold": _NUMBER, "threshold_mode": ("rel", "abs"),
            "cooldown": _WHOLE, "min_lr": _NUMBER, "eps": _NUMBER}  # fmt: skip
# Schedules of transformers, and the types or the words that each of their options may have.
SCHEDULES: dict[str, dict[str, tuple[type, ...] | tuple[str, ...]]] = {
    "cosine": {"num_cycles": _NUMBER},
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_min_lr": _MIN_LR,
    "cosine_with_restarts": {"num_cycles": _WHOLE},
    "polynomial": {"power": _NUMBER, "lr_end": _NUMBER},
    "inverse_sqrt": {"timescale": _WHOLE},
    "warmup_stable_decay": {"num_decay_steps": _WHOLE, "num_stable_steps": _WHOLE, "warmup_type": _RISE,
                            "decay_type": _RISE, "min_lr_ratio": _NUMBER, "num_cycles": _NUMBER},
    "cosine_warmup_with_min_lr": {**_MIN_LR, "warmup_lr_rate": _NUMBER},
    "reduce_lr_on_plateau": _BY_LOSS,
    "greedy": {**_BY_LOSS, "warmup": _WHOLE, "max_lr": _NUMBER, "smooth": (bool,), "window_size": _WHOLE,
               "reset_start": _WHOLE},
}  # fmt: skip
FOLLOW_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")  # the losses of evaluations decide on the rate


def _expected_instead(value: Any, allowed: tuple[Any, ...]) -> str:
    """Return what an option takes instead of this value; nothing if it takes the value. allowed: words, or types."""
    if isinstance(allowed[0], str):
        return "" if value in allowed else " or ".join(allowed)
    if type(value) in allowed:
        return ""
    if allowed == (bool,):
        return "true or false"
    return "a whole number" if allowed == _WHOLE else "a number"


def _fault_of_scheduler_kwargs(kind: str, given: Mapping[str, Any], learning_rate: float) -> str | None:
    """Return the end of a sentence about options that a schedule does not have, or not with this value."""
    options = SCHEDULES[kind]
    for name, value in given.items():
        if name not in options:
            known = f"its options are {', '.join(options)}" if options else "it has no options"
            return f"has {name}, which {kind} does not have: {known}."
        expected = _expected_instead(value, options[name])
        if expected:
            return f"has {name}: {value}, which must be {expected}."
        if name in ("min_lr", "lr_end") and kind not in FOLLOW_EVALUATIONS and value >= learning_rate:
            return f"has {name}: {value:g}, which must be below train.learning_rate: {learning_rate:g}."
        if type(value) in _NUMBER and value < 0:
            return f"has {name}: {value:g}, which must not be negative."
    if {"min_lr", "min_lr_rate"} <= given.keys():
        return "has min_lr and min_lr_rate. Keep one of them."
    if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
        return "needs num_decay_steps for warmup_stable_decay: the number of steps in which the rate falls."
    return None


class GaloreSpec(Section):
    """GaLore's low-rank gradient projection; read with optim: galore_adamw."""

    rank: PositiveInt = 128
    """Rank of the projected gradients."""
    update_proj_gap: PositiveInt = 200
    """Steps between updates of the projection."""
    scale: PositiveFloat = 0.25
    """Learning rate of projected matrices, relative to learning_rate."""


class LrGroupSpec(Section):
    """A learning rate or weight decay of some parameters."""

    parameters: Expression
    """Regular expression, searched in the names of the parameters that train; the first group that matches decides."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Peak learning rate of these parameters; null: train.learning_rate."""
    weight_decay: Share | None = None
    """Weight decay of these parameters, norms and biases included; null: as of all others."""


class TrainSpec(Section):
    """Batch size, number of steps, optimizer and memory savings."""

    per_device_train_batch_size: Literal["auto"] | RowCount = 4
    """Rows per device and forward pass (packed rows, or examples); auto: the largest that fits."""
    gradient_accumulation_steps: RowCount | None = 1
    """Forward passes per optimizer step; or give global_batch_size."""
    global_batch_size: Annotated[int, Field(ge=1, le=MAX_ROWS_OF_A_STEP)] | None = None
    """Rows per optimizer step over all devices, instead of gradient_accumulation_steps."""
    num_train_epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = 1.0
    """Passes over the data; or give max_steps."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps, instead of num_train_epochs."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-5
    """Peak learning rate."""
    lr_groups: Annotated[tuple[LrGroupSpec, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or weight decay of their own; they share schedule and warm-up."""
    lr_scheduler_type: Literal[tuple(SCHEDULES)] = "cosine"
    """Learning rate schedule after the warm-up, as in transformers; constant has no warm-up."""
    lr_scheduler_kwargs: dict[str, bool | int | float | str] = Field({})
    """Options of the schedule, as in transformers, such as {num_cycles: 3} for cosine_with_restarts."""
    warmup_ratio: Share | None = 0.03
    """Share of the steps with a rising learning rate; or give warmup_steps."""
    warmup_steps: NonNegativeInt | None = None
    """Number of steps with a rising learning rate, instead of warmup_ratio."""
    min_lr_ratio: Share = 0.1
    """With schedules whose name ends in min_lr: the final learning rate, as a share of learning_rate."""
    optim: Literal[tuple(OPTIMIZERS)] = "adamw_torch_fused"
    """Optimizer."""
    optim_in_backward: Switch = False
    """Update each parameter in the backward and free its gradient at once; gradients cannot accumulate."""
    optim_offload: Switch = False
    """Keep the optimizer states in host memory and step on the CPU: slow, but no GPU memory."""
    galore: GaloreSpec = GaloreSpec()
    weight_decay: Share = 0.0
    """Decoupled weight decay; norms and biases are never decayed."""
    adam_beta1: ShareBelowOne = 0.9
    """AdamW: decay rate of the first moment."""
    adam_beta2: ShareBelowOne = 0.999
    """AdamW: decay rate of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW: term added to the denominator."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Norm to clip gradients to; 0: no clipping."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune: noise on the input embeddings of at most this, divided by sqrt(length * hidden size); null: none."""
    group_by_length: Switch = True
    """Without packing: batch examples of similar length."""
    full_determinism: Switch = True
    """Give bit-equal results in every run on the same device, and after a resume."""
    gradient_checkpointing: SwitchOrOffload = False
    """Recompute activations; offload, offload_gate, offload_both: keep layer inputs, MLP gates, both on the host."""
    gradient_checkpointing_layers: Literal["all", "auto"] | PositiveInt = "all"
    """With gradient_checkpointing: number of first layers to checkpoint; auto: as few as memory allows."""
    tiled_mlp: TiledSwitch = "auto"
    """Run MLPs and projections on this many tokens at a time (true: 4096); auto: if nothing else fits on the GPU."""
    torch_compile: Switch = False
    """Compile each layer with torch.compile: minutes at the start, then faster steps."""
    cuda_graphs: Switch = False
    """Replay forward and backward as a CUDA graph: on one GPU, for steps so small that kernel launches limit them."""
    fp8: Literal["torchao"] | Switch = False
    """Multiply in float8 in linear layers, with our kernels or torchao's; trained weights keep their dtype."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of weight initialisation, data order and validation split."""

    @model_validator(mode="before")
    @classmethod
    def _given_key_replaces_a_default(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        replaced = {key: None for key, rival in EITHER_OR.items() if given.get(rival) is not None}
        return {**replaced, **given}

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _has_options_of_its_schedule(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        kind = info.data.get("lr_scheduler_type")  # absent if it is invalid itself
        fault = kind and _fault_of_scheduler_kwargs(kind, given, info.data.get("learning_rate", 1.0))
        if fault:
            raise unusable(fault)
        return given


class EvalSpec(Section):
    """Evaluation on held-out data."""

    eval_strategy: When = "no"
    """Evaluate never, every eval_steps, or after each epoch."""
    eval_steps: StepsOrShare = 200
    """With eval_strategy: steps: steps between evaluations; below 1: a share of all steps."""
    per_device_eval_batch_size: RowCount = 4
    """Rows per device and evaluation pass."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many evaluations without a lower loss; null: never."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """With early_stopping_patience: a loss counts as lower if it is by more than this."""
    eval_on_start: AutoSwitch = "auto"
    """Evaluate before the first step, for the report only; auto: if that takes less than about 2 % of the run."""
    sample_prompts: NameList = ()
    """Prompts to answer after each evaluation."""


class CheckpointSpec(Section):
    """Output folder, checkpoints and resuming."""

    output_dir: OutputPath
    """Output folder of the run, relative to the current folder."""
    save_strategy: When = "steps"
    """Save never, every save_steps, or after each epoch."""
    save_steps: StepsOrShare = 200
    """With save_strategy: steps: steps between checkpoints; below 1: a share of all steps."""
    save_total_limit: PositiveInt | None = 2
    """Number of checkpoints to keep; the oldest are deleted; null: keep all."""
    async_save: Switch = False
    """Write checkpoints in the background, from a copy of the state in host memory."""
    save_model: Switch = True
    """Write the trained model to output_dir/model at the end."""
    resume_from_checkpoint: Resume = "never"
    """never, newest (the newest checkpoint in output_dir), auto (the same, or step 0), or a checkpoint's path."""
    load_best_model_at_end: Switch = False
    """Keep the weights with the lowest evaluation loss instead of the last ones."""
    overwrite: Switch = False
    """Replace the run that output_dir holds."""
    save_on_signal: Switch = True
    """Save a checkpoint before exiting on SIGTERM or Ctrl-C."""


class MedusaSpec(Section):
    """Medusa heads; read with task: medusa."""

    # Medusa (Cai et al. 2024): head k predicts the token k + 1 positions ahead

    num_heads: Annotated[int, Field(ge=1, le=16)] = 5
    """Number of heads."""
    num_layers: Annotated[int, Field(ge=1, le=64)] = 1
    """Residual blocks per head."""
    stage: Literal[1, 2] = 1
    """1: train the heads only; 2: train the model and the heads."""
    lm_head: Literal["shared", "own"] = "shared"
    """Output projection of the heads; shared: the model's; own: a trained copy per head."""
    heads_path: FileOrHub | None = None
    """Folder of trained heads to start from; required in stage 2."""
    decay_coefficient: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of the loss of head k: decay_coefficient to the power k."""
    heads_coefficient: NonNegativeFloat = 0.2
    """Stage 2: weight of the sum of the head losses."""
    heads_warmup_ratio: Share = 0.1
    """Stage 2: share of the steps in which heads_coefficient rises linearly from 0."""
    lr_multiplier: PositiveFloat = 4.0
    """Stage 2: learning rate of the heads, relative to the model's."""
    self_distillation: Switch = False
    """Stage 2: train the model towards its initial distribution (KL) instead of the labels."""
    expand_lm_head: Switch = False
    """Write a copy of a shared projection for each head, as TensorRT-LLM expects."""
    tree_nodes: Annotated[int, Field(ge=2, le=512)] = 64
    """Maximum number of candidate tokens that one decoding step verifies."""
    eval_prompts: NonNegativeInt = 8
    """Held-out prompts to time decoding on after training; 0: none."""
    eval_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 128
    """Maximum number of new tokens per prompt."""


class PreferenceSpec(Section):
    """Preference optimisation; read with task: dpo."""

    loss_type: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = "sigmoid"
    """sigmoid: DPO; ipo, hinge, robust: its variants; simpo, orpo: without a reference; kto: single answers."""
    beta: PositiveFloat = 0.1
    """Strength of the preference, and of the tie to the reference."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid, robust: probability that a pair is labelled the wrong way round."""
    simpo_gamma: NonNegativeFloat = 0.5
    """simpo: margin of the reward that the chosen answer should have."""
    orpo_alpha: PositiveFloat = 0.1
    """orpo: weight of the odds ratio next to the loss on the chosen answer."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the cross-entropy of the chosen answer (RPO); 0: without."""
    ld_alpha: Share | None = None
    """LD-DPO: weight of tokens beyond the length of the shorter answer; null: 1."""
    length_normalization: Switch = False
    """Divide log-probabilities by the length of the answer; ipo and simpo always do."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of the losses of desirable answers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of the losses of undesirable answers."""
    reference: Literal["auto", "precompute", "adapter", "copy"] = "auto"
    """Where reference log-probabilities come from: precompute (before training), adapter (LoRA switched off), copy."""


class ClassificationSpec(Section):
    """Sequence classification; read with task: classification."""

    num_labels: Annotated[PositiveInt, Field(le=2**20)] | None = None  # transformers writes a name for each
    """Number of labels, or of numbers to predict; null: from the data."""
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """Loss: cross-entropy, one binary cross-entropy per label, or squared error; null: from the labels."""
    labels: NameList | None = None
    """Names of the labels in the order of their ids; null: from the data, sorted."""


class RewardSpec(Section):
    """Reward model; read with task: reward."""

    center_rewards_coefficient: NonNegativeFloat | None = None
    """Weight of the squared sum of a pair's rewards, which keeps rewards near 0; null: without."""


class DistillSpec(Section):
    """Distillation from a teacher model; read with task: distill."""

    teacher: FileOrHub | None = None
    """Hub id or folder of the teacher; its vocabulary must be the student's."""
    teacher_revision: Text = "main"
    """Branch, tag or commit of the teacher on the hub."""
    teacher_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the teacher's weights; auto: the dtype in which the student computes."""
    teacher_load_in_4bit: Switch = False
    """Quantise the teacher's layers to 4 bits (NF4) while they are loaded; needs bitsandbytes."""
    teacher_offload: Switch = False
    """Keep the teacher's layers in host memory, and copy each to the device for its part of the forward: slow."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "jsd"
    """forward_kl: KL(teacher || student); reverse_kl: KL(student || teacher); jsd: in between, by beta."""
    beta: Share = 0.5
    """jsd: weight of the teacher in the mixture."""
    temperature: PositiveFloat = 1.0
    """Divisor of both models' logits."""
    sft_weight: Share = 0.0
    """Weight of the cross-entropy of the labels; the divergence has the rest."""
    teacher_file: FileOrHub | None = None
    """Folder of `ligertune distill --write`: train from its log-probabilities, without the teacher."""
    top_k: Annotated[int, Field(ge=1, le=2**20)] = 64
    """ligertune distill --write: number of tokens whose log-probabilities are written for each trained token."""
