"""Schema of the recipe sections `train`, `eval` and `checkpoint`: keys, types, defaults and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    AutoSwitchOrOffload,
    Expression,
    MetricName,
    NameList,
    OutputPath,
    Resume,
    Section,
    Share,
    ShareBelowOne,
    StepsOrShare,
    Switch,
    TaskNames,
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

OptionValues = tuple[type, ...] | tuple[str, ...]  # types or words that an option of a schedule may have
_NUMBER = (int, float)
_WHOLE = (int,)
_RISE = ("linear", "cosine", "1-sqrt")
_MIN_LR: dict[str, OptionValues] = {"num_cycles": _NUMBER, "min_lr": _NUMBER, "min_lr_rate": _NUMBER}
_BY_LOSS: dict[str, OptionValues] = {
    "factor": _NUMBER,
    "patience": _WHOLE,
    "threshold": _NUMBER,
    "threshold_mode": ("rel", "abs"),
    "cooldown": _WHOLE,
    "min_lr": _NUMBER,
    "eps": _NUMBER,
}
_DIVISORS = ("timescale", "window_size", "factor")  # transformers divides by them
_SHARES = ("min_lr_rate", "min_lr_ratio", "warmup_lr_rate")  # of the peak rate
_MAX_OPTION = 10**9  # far above any number of steps or cycles; 10**309 and more are no floats
# schedules of transformers, with their options
SCHEDULES: dict[str, dict[str, OptionValues]] = {
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
# type checkers cannot read a Literal whose words are computed
if TYPE_CHECKING:
    ScheduleName = str
    OptimizerName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
    OptimizerName = Literal[tuple(OPTIMIZERS)]
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


def _outside_range(name: str, value: float) -> str:
    """Return the range that an option's number must be in, as the end of a sentence; nothing if it is in it."""
    if value < 0:
        return "not be negative"
    if value == 0 and name in _DIVISORS:
        return "be above 0"
    if value > 1 and name in _SHARES:
        return "be at most 1"
    if value >= 1 and name == "factor":
        return "be below 1"
    return "be at most 1,000,000,000" if value > _MAX_OPTION else ""


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
        outside = _outside_range(name, value) if type(value) in _NUMBER else ""
        if outside:
            shown = f": {value:g}" if abs(value) <= _MAX_OPTION else ""  # `:g` fails for an int above 1.8e308
            return f"has {name}{shown}, which must {outside}."
        if name in ("min_lr", "lr_end") and kind not in FOLLOW_EVALUATIONS and value >= learning_rate:
            return f"has {name}: {value:g}, which must be below train.learning_rate: {learning_rate:g}."
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

    per_device_train_batch_size: Literal["auto"] | RowCount = "auto"
    """Rows per device and forward pass (packed rows, or examples); auto: the fastest that fits, or 4."""
    gradient_accumulation_steps: Literal["auto"] | RowCount | None = "auto"
    """Forward passes per optimizer step; auto: what the global batch needs, or 1."""
    global_batch_size: Annotated[int, Field(ge=1, le=MAX_ROWS_OF_A_STEP)] | None = None
    """Rows per optimizer step over all devices; null: 4 per device, unless the two keys above are numbers."""
    global_batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step over all devices, in whole rows, instead of global_batch_size."""
    num_train_epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = 1.0
    """Passes over the data; or give max_steps."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps, instead of num_train_epochs."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-5
    """Peak learning rate."""
    lr_groups: Annotated[tuple[LrGroupSpec, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or weight decay of their own; they share schedule and warm-up."""
    lr_scheduler_type: ScheduleName = "cosine"
    """Learning rate schedule after the warm-up, as in transformers; constant has no warm-up."""
    lr_scheduler_kwargs: dict[str, bool | int | float | str] = Field({})
    """Options of the schedule, as in transformers, such as {num_cycles: 3} for cosine_with_restarts."""
    warmup_ratio: Share | None = 0.03
    """Share of the steps with a rising learning rate; or give warmup_steps."""
    warmup_steps: NonNegativeInt | None = None
    """Number of steps with a rising learning rate, instead of warmup_ratio."""
    min_lr_ratio: Share = 0.1
    """With schedules whose name ends in min_lr: the final learning rate, as a share of learning_rate."""
    optim: OptimizerName = "adamw_torch_fused"
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
    label_smoothing_factor: ShareBelowOne = 0.0
    """Share of each label's weight that all classes get in training; evaluation has none."""
    loss_type: Literal["nll", "dft"] = "nll"
    """nll: cross-entropy; dft (dynamic fine-tuning): each token's times its own probability, in training."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune: noise on the input embeddings of at most this, divided by sqrt(length * hidden size); null: none."""
    group_by_length: Switch = True
    """Without packing: batch examples of similar length."""
    full_determinism: Switch = True
    """Give bit-equal results in every run on the same device, and after a resume."""
    gradient_checkpointing: AutoSwitchOrOffload = "auto"
    """Recompute activations; offload, offload_gate, offload_both: keep layer inputs, MLP gates, both on the host."""
    gradient_checkpointing_layers: Literal["all", "auto"] | PositiveInt = "all"
    """With gradient_checkpointing: number of first layers to checkpoint; auto: as few as memory allows."""
    tiled_mlp: TiledSwitch = "auto"
    """Run MLPs and projections on this many tokens at a time (true: 4096); auto: if nothing else fits on the GPU."""
    torch_compile: Switch = False
    """Compile each layer with torch.compile: minutes at the start, then faster steps."""
    cuda_graphs: AutoSwitch = "auto"
    """Replay forward and backward as a CUDA graph, on one GPU; auto: if the GPU would wait for the host."""
    fp8: Literal["torchao"] | Switch = False
    """Multiply in float8 in linear layers, with our kernels or torchao's; trained weights keep their dtype."""
    # `set_seed` also seeds numpy's global generator, which takes 32 bits
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of weight initialisation, data order and validation split."""

    @model_validator(mode="before")
    @classmethod
    def _given_key_replaces_a_default(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        replaced = {key: None for key, rival in EITHER_OR.items() if given.get(rival) is not None}
        return {**replaced, **{key: value for key, value in given.items() if key not in replaced or value != "auto"}}

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
    """Stop after this many evaluations without a better one: a lower loss, unless the task says; null: never."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """With early_stopping_patience: a loss counts as lower if it is by more than this."""
    eval_on_start: AutoSwitch = "auto"
    """Evaluate before the first step, for the report only; auto: if that takes less than about 2 % of the run."""
    sample_prompts: NameList = ()
    """Prompts to answer before training and after each evaluation; eval_on_start: false leaves out the former."""
    metric: MetricName | None = None
    """Score of answers to held-out prompts: exact_match, or file.py:function(answer, reference, prompt); null: none."""
    tasks: TaskNames = ()
    """Tasks of lm-evaluation-harness for each evaluation: names, or YAML files; they need lm-eval."""
    answer_samples: PositiveInt | None = 64
    """With metric or tasks: held-out prompts, or documents of each task, in each evaluation; null: all."""
    answer_tokens: Annotated[int, Field(ge=1, le=2**20)] = 128
    """With metric: longest answer, in tokens."""


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
    """Keep the weights of the best evaluation, that with the lowest loss unless the task says, not the last ones."""
    overwrite: Switch = False
    """Replace the run that output_dir holds."""
    save_on_signal: Switch = True
    """Save a checkpoint before exiting on SIGTERM or Ctrl-C."""
