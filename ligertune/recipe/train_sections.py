"""The recipe's sections `train`, `eval`, `checkpoint` and `medusa`: keys, defaults and bounds."""

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

# A key with a default, and the key that replaces it when it is given.
EITHER_OR = {
    "num_train_epochs": "max_steps",
    "gradient_accumulation_steps": "global_batch_size",
    "warmup_ratio": "warmup_steps",
}


class GaloreSpec(Section):
    """GaLore's projection of the gradients; for optim: galore_adamw."""

    rank: PositiveInt = Field(128, description="Rank that the gradient of each matrix in the layers is projected to.")
    update_proj_gap: PositiveInt = Field(200, description="Steps after which the projections are chosen anew.")
    scale: PositiveFloat = Field(0.25, description="Times learning_rate: the rate of those matrices.")


class TrainSpec(Section):
    """Batches, steps and the optimizer."""

    per_device_train_batch_size: Literal["auto"] | PositiveInt = Field(
        4, description="Rows per device in one forward pass: packs, or examples; auto: the most that fit."
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        1, description="Forward passes per optimizer step; or give global_batch_size."
    )
    global_batch_size: PositiveInt | None = Field(
        None, description="Rows per optimizer step on all devices, instead of gradient_accumulation_steps."
    )
    num_train_epochs: PositiveFloat | None = Field(1.0, description="Passes over the data; or give max_steps.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps, instead of num_train_epochs.")
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(2e-5, description="Peak learning rate.")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr"] = Field(
        "cosine", description="How the learning rate moves after the warm-up; constant has no warm-up."
    )
    warmup_ratio: Share | None = Field(0.03, description="Share of the steps that warm up; or give warmup_steps.")
    warmup_steps: NonNegativeInt | None = Field(None, description="Steps that warm up, instead of warmup_ratio.")
    min_lr_ratio: Share = Field(0.1, description="Floor of cosine_with_min_lr, as a share of learning_rate.")
    optim: Literal[tuple(OPTIMIZERS)] = Field("adamw_torch_fused", description="Optimizer.")
    optim_in_backward: Switch = Field(
        False, description="Update each parameter as soon as its gradient is there, and free that: no accumulation."
    )
    optim_offload: Switch = Field(
        False,
        description="Keep the optimizer's states in host memory and step on the processor: slow, and no GPU bytes.",
    )
    galore: GaloreSpec = Field(GaloreSpec(), description="Numbers of optim: galore_adamw.")
    weight_decay: Share = Field(0.0, description="Decoupled weight decay; norms and biases are never decayed.")
    adam_beta1: ShareBelowOne = Field(0.9, description="AdamW: decay of the mean of the gradients.")
    adam_beta2: ShareBelowOne = Field(0.999, description="AdamW: decay of the mean of their squares.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW: added to the denominator.")
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Gradients are clipped to this norm; 0 does not clip.")
    group_by_length: Switch = Field(True, description="Without packing: batches of examples of about one length.")
    full_determinism: Switch = Field(True, description="The same bits in every run on one device, and after a resume.")
    gradient_checkpointing: SwitchOrOffload = Field(
        False,
        description="Recompute activations in the backward; offload also keeps layer inputs in host memory. "
        "offload_gate keeps the MLPs' gates there instead of recomputing them, as far as the link keeps up; "
        "offload_both does both.",
    )
    gradient_checkpointing_layers: Literal["all", "auto"] | PositiveInt = Field(
        "all",
        description="With gradient_checkpointing: how many layers are checkpointed, the first ones; the others keep "
        "their activations. auto: as few as memory has room for.",
    )
    torch_compile: Switch = Field(False, description="Compile each layer with torch: some minutes, then faster steps.")
    cuda_graphs: Switch = Field(
        False,
        description="Record forward and backward and launch them at once: for one GPU, and steps so small that the "
        "host takes longer.",
    )
    fp8: Switch = Field(
        False,
        description="Multiply in float8 in the layers' linear layers (torchao); weights stay as they are. "
        "Less exact, and faster with torch_compile.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(42, description="Seed of weights, order and split.")

    @property
    def few_shapes(self) -> bool:
        """Whether each shape of batch costs something: a graph of torch.compile, or of CUDA."""
        return self.torch_compile or self.cuda_graphs

    @model_validator(mode="before")
    @classmethod
    def _given_key_replaces_a_default(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        replaced = {key: None for key, rival in EITHER_OR.items() if given.get(rival) is not None}
        return {**replaced, **given}


class EvalSpec(Section):
    """When the loss on held-out data is measured."""

    eval_strategy: When = Field("no", description="Evaluate never, every eval_steps, or after each epoch.")
    eval_steps: PositiveInt = Field(200, description="Steps between evaluations, with eval_strategy: steps.")
    per_device_eval_batch_size: PositiveInt = Field(4, description="Rows per device in one evaluation pass.")
    early_stopping_patience: PositiveInt | None = Field(
        None, description="Stop after this many evaluations in a row without a lower loss; null: never."
    )
    sample_prompts: NameList = Field((), description="Prompts that are answered after each evaluation.")


class CheckpointSpec(Section):
    """Where the run is kept, and how it is continued."""

    output_dir: OutputPath = Field(description="Folder of the run, relative to the current one.")
    save_strategy: When = Field("steps", description="Save never, every save_steps, or after each epoch.")
    save_steps: PositiveInt = Field(200, description="Steps between checkpoints, with save_strategy: steps.")
    save_total_limit: PositiveInt = Field(2, description="Checkpoints that are kept; the oldest go first.")
    async_save: Switch = Field(
        False, description="Write checkpoints while training goes on, from a copy of the state in host memory."
    )
    save_model: Switch = Field(True, description="Write the trained model to output_dir/model when the run is done.")
    resume_from_checkpoint: Resume = Field(
        "never", description="never, auto (the newest complete checkpoint of output_dir), or a checkpoint's folder."
    )
    load_best_model_at_end: Switch = Field(
        False, description="End with the weights of the lowest evaluation loss instead of the last ones."
    )
    overwrite: Switch = Field(False, description="Replace a run that output_dir already holds.")
    save_on_signal: Switch = Field(True, description="Save before exiting on SIGTERM or Ctrl-C.")


class MedusaSpec(Section):
    """Heads that guess several tokens ahead; with task: medusa. Head k predicts the token k + 1 places on."""

    num_heads: Annotated[int, Field(ge=1, le=16)] = Field(5, description="Heads K.")
    num_layers: PositiveInt = Field(1, description="Residual blocks of each head.")
    stage: Literal[1, 2] = Field(1, description="1: only the heads train; 2: the model trains with them.")
    lm_head: Literal["shared", "own"] = Field(
        "shared", description="Projection of the heads: the model's own, or a trained copy of it for each."
    )
    heads_path: FileOrHub | None = Field(None, description="Folder of trained heads to start from; stage 2 needs it.")
    decay_coefficient: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="Head k's loss counts decay_coefficient to the power k."
    )
    heads_coefficient: NonNegativeFloat = Field(0.2, description="Stage 2: weight of the heads' losses.")
    heads_warmup_ratio: Share = Field(
        0.1, description="Stage 2: share of the steps over which heads_coefficient rises from 0, linearly."
    )
    lr_multiplier: PositiveFloat = Field(4.0, description="Stage 2: the heads' learning rate over the model's.")
    self_distillation: Switch = Field(
        False, description="Stage 2: the model keeps to its own distribution (KL) instead of learning from the data."
    )
    expand_lm_head: Switch = Field(
        False, description="Write a copy of a shared projection for each head, as TensorRT-LLM reads them."
    )
    tree_nodes: Annotated[int, Field(ge=2, le=512)] = Field(
        64, description="Most tokens of the tree of guesses that one decoding step checks."
    )
    eval_prompts: NonNegativeInt = Field(
        8, description="Held-out prompts on which decoding is timed after training; 0 does not."
    )
    eval_new_tokens: PositiveInt = Field(128, description="The most tokens written for each of those prompts.")
