"""Options: what later stages read of the recipe.

Code below `planning/` never imports the recipe. It receives sections of it, under the names that follow here, or the
`Plan` that holds them. A section with keys that planning still resolves, such as `train`, is not passed on; the values
of it that are final are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ligertune.hardware import Machine
from ligertune.recipe.feature import feature_parts, modality_parts
from ligertune.recipe.schema import (
    DatasetSpec,
    DataSpec,
    InterleaveSpec,
    KernelsSpec,
    LoggingSpec,
    MethodSpec,
    ModelSpec,
    ParallelSpec,
    Recipe,
    ReportSpec,
    TokenizerSpec,
)
from ligertune.recipe.section import Section
from ligertune.recipe.train_sections import CheckpointSpec, EvalSpec, LrGroupSpec

TokenizerOptions = TokenizerSpec
ModelOptions = ModelSpec
KernelOptions = KernelsSpec
MethodOptions = MethodSpec
DatasetOptions = DatasetSpec
DataOptions = DataSpec
InterleaveOptions = InterleaveSpec
LrGroupOptions = LrGroupSpec

SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True)
class ExecutionOptions:
    """How a step is executed."""

    torch_compile: bool
    cuda_graphs: Literal["auto"] | bool  # auto: chosen by the plan; the run goes on if a step cannot be recorded
    fp8: Literal["torchao"] | bool
    full_determinism: bool
    gradient_checkpointing: Literal["offload", "offload_gate", "offload_both"] | bool
    neftune_noise_alpha: float | None
    label_smoothing_factor: float
    loss_type: Literal["nll", "dft"]


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
    full_determinism: bool
    cp_size: int
    why_not_packed: str | None = None  # why documents of a row would influence each other in this model

    @property
    def packing(self) -> bool:
        return self.kind == "packed"

    @staticmethod
    def of(recipe: Recipe, *, packing: bool | None = None, why_not_packed: str | None = None) -> BatchLayoutOptions:
        """Copy the values out of a recipe. packing: as resolved for its model; None: the recipe's."""
        kernels = recipe.kernels
        train = recipe.train
        data = recipe.data
        enabled = kernels.enabled is not False
        packed = data.packing is not False if packing is None else packing
        # Compiled layers with our attention were not measured, so `auto` leaves it out there.
        allowed = enabled and not (kernels.attention == "auto" and train.torch_compile)
        return BatchLayoutOptions(
            kind="packed" if packed else "grouped" if train.group_by_length else "shuffled",
            max_length=data.max_length,
            attn_implementation=recipe.model.attn_implementation,
            kernels_enabled=enabled,
            document_attention=kernels.attention if allowed else False,
            padding_free=data.padding_free,
            micro_batch_size=train.per_device_train_batch_size,
            few_shapes=train.torch_compile or train.cuda_graphs is True,
            full_determinism=train.full_determinism,
            cp_size=recipe.parallel.cp_size,
            why_not_packed=why_not_packed,
        )

    def length_multiple(self, attention_multiple: int) -> int:
        """Return the multiple that batches are padded to. attention_multiple: what attention requires.

        torch.compile and CUDA graphs make one graph per length, and each takes minutes with torch 2.11. So packed rows
        get one length (`data.batching` pads them to it), and other rows at most eight.
        """
        multiple = attention_multiple * self.cp_size
        if not self.few_shapes:
            return multiple
        step = self.max_length if self.packing else -(-self.max_length // MAX_COMPILED_LENGTHS)
        return -(-step // multiple) * multiple


@dataclass(frozen=True)
class BuildOptions:
    """Everything that decides which model is built, and what is patched into it."""

    task: str
    seed: int
    model: ModelOptions
    method: MethodOptions
    kernels: KernelOptions
    sections: tuple[Section, ...]  # of features and modalities
    execution: ExecutionOptions
    lr_groups: tuple[LrGroupOptions, ...] = ()

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the section of this class, which a feature or modality has added."""
        return next(section for section in self.sections if isinstance(section, kind))

    def with_section(self, kind: type[Section], **changes: object) -> BuildOptions:
        """Return the options with other values of keys in the section of this class."""
        sections = (one.model_copy(update=changes) if isinstance(one, kind) else one for one in self.sections)
        return replace(self, sections=tuple(sections))


@dataclass(frozen=True)
class RunOptions:
    """The options of a whole run, read from a recipe."""

    build: BuildOptions
    data_options: DataOptions
    layout: BatchLayoutOptions
    parallel: ParallelSpec
    checkpoint: CheckpointSpec
    evaluation: EvalSpec
    logging: LoggingSpec
    measurement: ReportSpec

    @staticmethod
    def of(recipe: Recipe) -> RunOptions:
        """Collect the options of a recipe, whose open settings count as off."""
        train = recipe.train
        parts = (*feature_parts(), *modality_parts())
        checkpointing = False if train.gradient_checkpointing == "auto" else train.gradient_checkpointing
        return RunOptions(
            build=BuildOptions(
                task=recipe.task,
                seed=train.seed,
                model=recipe.model,
                method=recipe.method,
                kernels=recipe.kernels,
                sections=tuple(recipe.section(kind) for part in parts for kind in part.sections.values()),
                lr_groups=train.lr_groups,
                execution=ExecutionOptions(
                    torch_compile=train.torch_compile,
                    cuda_graphs=train.cuda_graphs is True,
                    fp8=train.fp8,
                    full_determinism=train.full_determinism,
                    gradient_checkpointing=checkpointing,
                    neftune_noise_alpha=train.neftune_noise_alpha,
                    label_smoothing_factor=train.label_smoothing_factor,
                    loss_type=train.loss_type,
                ),
            ),
            data_options=recipe.data,
            layout=BatchLayoutOptions.of(recipe),
            parallel=recipe.parallel,
            checkpoint=recipe.checkpoint,
            evaluation=recipe.eval,
            logging=recipe.logging,
            measurement=recipe.report,
        )


def fuses_lora(recipe: Recipe, machine: Machine) -> bool:
    """Resolve `kernels.lora`. auto: true where it was measured to be faster."""
    train = recipe.train
    method = recipe.method
    if recipe.kernels.lora != "auto":
        return recipe.kernels.lora
    strategy = recipe.parallel.strategy
    lora = method.type == "lora" and not strategy.startswith("deepspeed")
    one = machine.world_size == 1 and method.type in ("lora", "qlora")
    several = recipe.parallel.cp_size == 1 and (lora or (method.type == "qlora" and strategy == "fsdp"))
    measured = machine.arch == "sm90" and (one or several)
    # torch.compile optimises peft's own code better. 8-bit weights were not measured. Dropout was slower (1B).
    return measured and not (train.torch_compile or method.load_in_8bit or method.lora_dropout)


def completed(
    recipe: Recipe,
    *,
    packing: bool,
    kernels: Mapping[str, object],
    token_ids: tuple[int, ...],
    sections: Mapping[str, Section],
) -> Recipe:
    """Return the recipe with the values that the machine, the model, its tokenizer and the data decide.

    kernels: decided values of that section. token_ids: of `method.trainable_token_indices`. sections: those that a
    feature completes from the data.
    """
    changes = {
        "data": recipe.data.model_copy(update={"packing": packing}),
        "kernels": recipe.kernels.model_copy(update=dict(kernels)),
        "method": recipe.method.model_copy(update={"trainable_token_indices": token_ids}),
    }
    return recipe.model_copy(update={**changes, **sections})
