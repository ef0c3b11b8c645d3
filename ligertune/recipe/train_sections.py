"""Schema of the recipe sections `train`, `eval`, `checkpoint` and `medusa`: keys, types, defaults and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.section import (
    FileOrHub,
    NameList,
    OutputPath,
    Resume,
    Section,
    Share,
    ShareBelowOne,
    Switch,
    SwitchOrOffload,
    When,
)

# Keys of `train` with a default, and the key that replaces each if it is given.
EITHER_OR = {
    "num_train_epochs": "max_steps",
    "gradient_accumulation_steps": "global_batch_size",
    "warmup_ratio": "warmup_steps",
}


class GaloreSpec(Section):
    """GaLore's low-rank gradient projection; read with optim: galore_adamw."""

    rank: PositiveInt = Field(128, description="Rank of the projected gradients.")
    update_proj_gap: PositiveInt = Field(200, description="Steps between updates of the projection.")
    scale: PositiveFloat = Field(0.25, description="Learning rate of projected matrices, relative to learning_rate.")


class TrainSpec(Section):
    """Batch size, number of steps, optimizer and memory savings."""

    per_device_train_batch_size: Literal["auto"] | PositiveInt = Field(
        4, description="Rows per device and forward pass (packed rows, or examples); auto: the largest that fits."
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        1, description="Forward passes per optimizer step; or give global_batch_size."
    )
    global_batch_size: PositiveInt | None = Field(
        None, description="Rows per optimizer step over all devices, instead of gradient_accumulation_steps."
    )
    num_train_epochs: PositiveFloat | None = Field(1.0, description="Passes over the data; or give max_steps.")
    max_steps: PositiveInt | None = Field(None, description="Number of optimizer steps, instead of num_train_epochs.")
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(2e-5, description="Peak learning rate.")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr"] = Field(
        "cosine", description="Learning rate schedule after the warm-up; constant has no warm-up."
    )
    warmup_ratio: Share | None = Field(
        0.03, description="Share of the steps with a rising learning rate; or give warmup_steps."
    )
    warmup_steps: NonNegativeInt | None = Field(
        None, description="Number of steps with a rising learning rate, instead of warmup_ratio."
    )
    min_lr_ratio: Share = Field(
        0.1, description="With cosine_with_min_lr: the final learning rate, as a share of learning_rate."
    )
    optim: Literal[tuple(OPTIMIZERS)] = Field("adamw_torch_fused", description="Optimizer.")
    optim_in_backward: Switch = Field(
        False,
        description="Update each parameter in the backward, as soon as its gradient is complete, and free the gradient;"
        " without accumulation.",
    )
    optim_offload: Switch = Field(
        False, description="Keep the optimizer states in host memory and step on the CPU: slow, but no GPU memory."
    )
    galore: GaloreSpec = Field(
        GaloreSpec(), description="GaLore's low-rank gradient projection; read with optim: galore_adamw."
    )
    weight_decay: Share = Field(0.0, description="Decoupled weight decay; norms and biases are never decayed.")
    adam_beta1: ShareBelowOne = Field(0.9, description="AdamW: decay rate of the first moment.")
    adam_beta2: ShareBelowOne = Field(0.999, description="AdamW: decay rate of the second moment.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW: term added to the denominator.")
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Norm to clip gradients to; 0: no clipping.")
    group_by_length: Switch = Field(True, description="Without packing: batch examples of similar length.")
    full_determinism: Switch = Field(
        True, description="Give bit-equal results in every run on the same device, and after a resume."
    )
    gradient_checkpointing: SwitchOrOffload = Field(
        False,
        description="Recompute activations in the backward; offload: also keep layer inputs in host memory; "
        "offload_gate: keep the MLPs' gates there instead of recomputing them, as far as the bandwidth allows; "
        "offload_both: both.",
    )
    gradient_checkpointing_layers: Literal["all", "auto"] | PositiveInt = Field(
        "all",
        description="With gradient_checkpointing: number of layers to checkpoint, counted from the first; auto: as few "
        "as memory allows.",
    )
    torch_compile: Switch = Field(
        False, description="Compile each layer with torch.compile: minutes at the start, then faster steps."
    )
    cuda_graphs: Switch = Field(
        False,
        description="Replay forward and backward as a CUDA graph: on one GPU, for steps so small that kernel launches "
        "limit them.",
    )
    fp8: Switch = Field(
        False,
        description="Multiply in float8 in the linear layers (torchao); weights keep their dtype. Less exact; faster "
        "with torch_compile.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        42, description="Seed of weight initialisation, data order and validation split."
    )

    @property
    def few_shapes(self) -> bool:
        """Whether every new batch shape costs a compilation or a CUDA graph."""
        return self.torch_compile or self.cuda_graphs

    @model_validator(mode="before")
    @classmethod
    def _given_key_replaces_a_default(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        replaced = {key: None for key, rival in EITHER_OR.items() if given.get(rival) is not None}
        return {**replaced, **given}


class EvalSpec(Section):
    """Evaluation on held-out data."""

    eval_strategy: When = Field("no", description="Evaluate never, every eval_steps, or after each epoch.")
    eval_steps: PositiveInt = Field(200, description="With eval_strategy: steps: steps between evaluations.")
    per_device_eval_batch_size: PositiveInt = Field(4, description="Rows per device and evaluation pass.")
    early_stopping_patience: PositiveInt | None = Field(
        None, description="Stop after this many evaluations without a lower loss; null: never."
    )
    sample_prompts: NameList = Field((), description="Prompts to answer after each evaluation.")


class CheckpointSpec(Section):
    """Output folder, checkpoints and resuming."""

    output_dir: OutputPath = Field(description="Output folder of the run, relative to the current folder.")
    save_strategy: When = Field("steps", description="Save never, every save_steps, or after each epoch.")
    save_steps: PositiveInt = Field(200, description="With save_strategy: steps: steps between checkpoints.")
    save_total_limit: PositiveInt = Field(2, description="Number of checkpoints to keep; the oldest are deleted.")
    async_save: Switch = Field(
        False, description="Write checkpoints in the background, from a copy of the state in host memory."
    )
    save_model: Switch = Field(True, description="Write the trained model to output_dir/model at the end.")
    resume_from_checkpoint: Resume = Field(
        "never", description="never, auto (the newest complete checkpoint in output_dir), or the path of a checkpoint."
    )
    load_best_model_at_end: Switch = Field(
        False, description="Keep the weights with the lowest evaluation loss instead of the last ones."
    )
    overwrite: Switch = Field(False, description="Replace the run that output_dir holds.")
    save_on_signal: Switch = Field(True, description="Save a checkpoint before exiting on SIGTERM or Ctrl-C.")


class MedusaSpec(Section):
    """Medusa heads (Cai et al. 2024); read with task: medusa. Head k predicts the token k + 1 positions ahead."""

    num_heads: Annotated[int, Field(ge=1, le=16)] = Field(5, description="Number of heads.")
    num_layers: PositiveInt = Field(1, description="Residual blocks per head.")
    stage: Literal[1, 2] = Field(1, description="1: train the heads only; 2: train the model and the heads.")
    lm_head: Literal["shared", "own"] = Field(
        "shared", description="Output projection of the heads; shared: the model's; own: a trained copy per head."
    )
    heads_path: FileOrHub | None = Field(
        None, description="Folder of trained heads to start from; required in stage 2."
    )
    decay_coefficient: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="Weight of the loss of head k: decay_coefficient to the power k."
    )
    heads_coefficient: NonNegativeFloat = Field(0.2, description="Stage 2: weight of the sum of the head losses.")
    heads_warmup_ratio: Share = Field(
        0.1, description="Stage 2: share of the steps in which heads_coefficient rises linearly from 0."
    )
    lr_multiplier: PositiveFloat = Field(
        4.0, description="Stage 2: learning rate of the heads, relative to the model's."
    )
    self_distillation: Switch = Field(
        False, description="Stage 2: train the model towards its initial distribution (KL) instead of the labels."
    )
    expand_lm_head: Switch = Field(
        False, description="Write a copy of a shared projection for each head, as TensorRT-LLM expects."
    )
    tree_nodes: Annotated[int, Field(ge=2, le=512)] = Field(
        64, description="Maximum number of candidate tokens that one decoding step verifies."
    )
    eval_prompts: NonNegativeInt = Field(8, description="Held-out prompts to time decoding on after training; 0: none.")
    eval_new_tokens: PositiveInt = Field(128, description="Maximum number of new tokens per prompt.")
