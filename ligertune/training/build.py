"""Build the model of a run by one list of steps: on devices to train it, on the meta device to plan it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from ligertune_kernels import backend
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import ligertune.attention.packed_documents  # noqa: F401  registers its attention with transformers
from ligertune.activations.checkpointing import checkpoint_layers
from ligertune.activations.gate_offload import OFFLOADED_GATES, offload_gates, refuse_fused_gates, require_gates
from ligertune.activations.result_offload import keep_projections
from ligertune.activations.tiling import tile_layers, tile_projections
from ligertune.any_types import AnyModule
from ligertune.attention.choice import AttentionChoice
from ligertune.attention.padding_free import choose_batch_layout
from ligertune.data.modalities.modality import modality_of
from ligertune.files.base_model import CarriedTensors, TrainedBase
from ligertune.files.model_files import RECIPE_MODEL, fingerprint_of_files, hub_snapshot, read_json
from ligertune.models.added_tokens import check_new_rows
from ligertune.models.block_scaled.block_format import held_as, stored_note
from ligertune.models.carried_tensors import carried_note, find_carried
from ligertune.models.compile import compile_layers
from ligertune.models.float8.float8_layers import float8_linears, to_float8, to_torchao_float8
from ligertune.models.float8.float8_linear import hold_frozen_weights
from ligertune.models.float8.float8_mlp import float8_mlps
from ligertune.models.load import build_model, carried_by, quantization_of
from ligertune.models.quantised_bases.stored_sizes import (
    check_packed_layers,
    stored_as_in_files,
    with_quantised_sizes,
    with_stored_sizes,
)
from ligertune.models.read_config import read_config, truncate
from ligertune.models.shape import base_of, read_shape
from ligertune.models.trainable import apply_method
from ligertune.patching.packing_checks import prepare_masks
from ligertune.patching.patch import patch
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.options import BuildOptions, MethodOptions
from ligertune.planning.plan import BuiltModel, KernelLine, Plan
from ligertune.training.checks import why_not_padding_free
from ligertune.training.optim.parameter_groups import check_lr_groups

Change = Callable[[PreTrainedModel], None]
REHEARSED_LAYERS = 2  # the second one takes what the first one gives, such as a residual to add in its norm


@dataclass
class ModelPreview:
    """Kernel lines and notes that a plan collects while its model is built."""

    options: BuildOptions
    kernels: list[KernelLine]
    notes: list[str]


def _unchanged(model: AnyModule, *context: object) -> AnyModule:
    return model


@dataclass(frozen=True)
class BuildStep:
    """One change of the patched model.

    train(model, plan, accelerator): change the model that trains. preview(model, preview): make the same change without
    weights, or check that it is possible, and add lines and notes. Both return the model.
    """

    train: Callable[[AnyModule, Plan, Accelerator], AnyModule] = _unchanged
    preview: Callable[[AnyModule, ModelPreview], AnyModule] = _unchanged


def preview_model(
    options: BuildOptions, config: PreTrainedConfig, attention: AttentionChoice, *, device: str
) -> BuiltModel:
    """Build the model on the meta device, which takes no memory; return its sizes and what our kernels patch.

    device: the type of device that the run will use. Raises UserError for settings that the model does not support.
    """
    implementation = attention.implementation or options.model.attn_implementation
    feature = feature_of(options.task)
    head_notes = feature.head_notes(options, config)
    original = copy.deepcopy(config)  # building a model changes it
    model: AnyModule
    model, kernels = _load_and_patch(options, config, implementation, dtype=torch.bfloat16, device="meta")
    check_packed_layers(model, options.model, original, options.method)
    carried = find_carried(options.model, original, model)
    implementation = model.config._attn_implementation
    stored = stored_note(options.method, options.model, original, model)
    preview = ModelPreview(options, list(kernels), [*head_notes, *filter(None, [stored])])
    for step in STEPS:
        model = step.preview(model, preview)
    shape = read_shape(model) if feature.shape is None else feature.shape(model)
    shape = with_stored_sizes(shape, options.model, original)
    if not feature.uses_method(options):
        shape = with_quantised_sizes(shape, feature.frozen_as(options) or stored_as_in_files(original))
    # `ligertune plan` may be for a GPU that this machine does not have
    simulated = device == "cuda" and not torch.cuda.is_available()
    return BuiltModel(
        shape,
        implementation,
        attention.why,
        kernels_backend="triton" if simulated else backend(device),
        kernels=tuple(preview.kernels),
        notes=(*preview.notes, *_carried_notes(options, carried)),
        carried=carried,
    )


def rehearsed_model(plan: Plan, config: PreTrainedConfig) -> nn.Module:
    """Build the model on the meta device with the attention and the dtype of the run, to see what a step launches.

    Where all layers are of one kind, the first ones launch what all launch.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if len(kinds) <= 1 and getattr(text, "num_hidden_layers", 0) > REHEARSED_LAYERS:
        truncate(config, REHEARSED_LAYERS)
    dtype = getattr(torch, plan.precision.weights)
    model: AnyModule
    model, kernels = _load_and_patch(plan.build, config, plan.attn_implementation, dtype=dtype, device="meta")
    prepare_masks(model)
    preview = ModelPreview(plan.build, list(kernels), [])
    for step in STEPS:
        model = step.preview(model, preview)
    return model


def trained_model(
    plan: Plan,
    config: PreTrainedConfig,
    accelerator: Accelerator,
    *,
    change: Change | None = None,
    loaded: Callable[[], object] = lambda: None,
) -> tuple[nn.Module, Plan]:
    """Build the model that the loop trains: patched, with adapters and added heads as the plan says.

    Also return the plan. It is another one, with padded batches, if the plan chose padding-free batches by itself and
    documents of a row influence each other in this model. change: called with the patched model, for comparisons.
    loaded: called before the first kernel is launched.
    """
    options = plan.build
    dtype = getattr(torch, plan.precision.weights)
    quantization = quantization_of(config)
    original = copy.deepcopy(config)  # building a model changes it
    model: AnyModule
    device = accelerator.device
    model, _ = _load_and_patch(
        options, config, plan.attn_implementation, dtype=dtype, device=device, shards=plan.strategy == "fsdp"
    )
    if change is not None:
        change(model)
    prepare_masks(model)
    loaded()
    # The model is checked before the steps: rows of the checks are shorter, so compiled layers would make a graph for
    # them; and the documents of a batch share one float8 scale, so they change each other's rounding.
    why = _check_loaded(model, plan, accelerator)
    if why is not None:
        del model
        config = read_config(options.model)  # building a model changes its configuration
        return trained_model(_with_padding(plan, config, why), config, accelerator, change=change)
    for step in STEPS:
        model = step.train(model, plan, accelerator)
    base = _base_of(plan, quantization)
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.revision = base.revision
    return model, _with_carried(replace(plan, base=base), original)


def _check_loaded(model: PreTrainedModel, plan: Plan, accelerator: Accelerator) -> str | None:
    """Check the patched model on a few rows; return why its batches must be padded, or None. Raises UserError."""
    with accelerator.autocast():
        feature_of(plan.build.task).check_model(model, plan)
        if not plan.rows.is_padding_free:
            return None
        with _without_outliers(model):
            return why_not_padding_free(plan, model)


def _compile(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    if plan.build.execution.torch_compile:
        compile_layers(model)
    return model


def _use_float8(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    fp8 = plan.build.execution.fp8
    if fp8 == "torchao":
        to_torchao_float8(model)
    elif fp8:
        to_float8(model)
    return model


def _preview_float8(model: AnyModule, preview: ModelPreview) -> AnyModule:
    fp8 = preview.options.execution.fp8
    if not fp8:
        return model
    linears = float8_linears(model)
    preview.kernels.append(KernelLine("float8_linear", *linears.counts()))
    if fp8 is True:
        preview.kernels.append(float8_mlps(model, linears.taken).line())
    return model


def _tile_layers(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    if plan.tile:
        tile_layers(model, plan.tile)
    return model


def _checkpoint(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    execution = plan.build.execution
    if kind := execution.gradient_checkpointing:
        overlap = not plan.tile
        checkpoint_layers(
            model, kind, first=plan.checkpointed_layers, compiled=execution.torch_compile, overlap=overlap
        )
    return model


def _keep_results(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    if plan.build.execution.gradient_checkpointing == "offload" and not plan.tile:
        keep_projections(model)
    return model


def _preview_checkpoints(model: AnyModule, preview: ModelPreview) -> AnyModule:
    asked = preview.options.execution.gradient_checkpointing
    if asked in OFFLOADED_GATES:
        require_gates(offload_gates(model), model.config.model_type, asked=asked)
    return model


def _apply_method(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    options = plan.build
    original = partial(_original_model, options, getattr(torch, plan.precision.weights))
    fused = options.kernels.fuses_lora
    return apply_method(model, options.method, seed=options.seed, fused=fused, original=original)


def _original_model(options: BuildOptions, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model before it is quantised, in host memory."""
    config = read_config(options.model)
    feature_of(options.task).prepare_config(config, options)
    spec = options.model.model_copy(update={"attn_implementation": "eager"})  # it never runs
    return build_model(spec, config, dtype=dtype, device="cpu", seed=options.seed)


def _preview_method(model: AnyModule, preview: ModelPreview) -> AnyModule:
    options = preview.options
    preview.notes += _adapter_notes(options, model)
    preview.notes += _original_notes(options.method)
    model = apply_method(model, options.method, fused=options.kernels.fuses_lora)
    if options.kernels.enabled is not False and options.method.type in ("lora", "qlora"):
        # imports peft, which takes seconds
        from ligertune.patching.lora.adapter_lines import adapter_lines, fuses_gates

        preview.kernels += adapter_lines(model)
        asked = options.execution.gradient_checkpointing
        if asked in OFFLOADED_GATES and fuses_gates(model):
            refuse_fused_gates(str(asked))
    check_new_rows(model, options.model.tokenizer)
    check_lr_groups(model, [group.parameters for group in options.lr_groups])
    return model


def _original_notes(method: MethodOptions) -> tuple[str, ...]:
    """Return a note on the model before quantisation that an initial adapter is computed from."""
    init = method.init_lora_weights
    if method.type != "qlora" or not method.init_from_weights:
        return ()
    parts = "the error of each" if init == "loftq" else "each"
    time = "" if "_niter_" in init else ", which takes minutes for large models"
    return (
        f"method.init_lora_weights: {init}: each process reads the weights once more, into host memory, and "
        f"decomposes {parts}{time}",
    )


def _hold_frozen(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    if plan.build.method.type == "lora":
        hold_frozen_weights(model)
    return model


def _tile_projections(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    if plan.tile:
        tile_projections(model, plan.tile)
    return model


def _add_heads(model: AnyModule, plan: Plan, accelerator: Accelerator) -> AnyModule:
    with accelerator.autocast():  # added heads are compared with the model's own output, and adapters are float32
        return feature_of(plan.build.task).wrap(plan.build, model)


def _preview_heads(model: AnyModule, preview: ModelPreview) -> AnyModule:
    feature = feature_of(preview.options.task)
    preview.kernels += feature.kernel_lines(preview.options.kernels)
    return feature.wrap(preview.options, model)


# In this order: float8 and tiles replace the layers that adapters wrap, a compiled or checkpointed layer keeps what is
# added inside it, and the projections of a tiled layer are tiled together with their adapters.
STEPS = (
    BuildStep(train=_compile),
    BuildStep(train=_use_float8, preview=_preview_float8),
    BuildStep(train=_tile_layers),
    BuildStep(train=_checkpoint, preview=_preview_checkpoints),
    BuildStep(train=_apply_method, preview=_preview_method),
    BuildStep(train=_keep_results),
    BuildStep(train=_hold_frozen),
    BuildStep(train=_tile_projections),
    BuildStep(train=_add_heads, preview=_preview_heads),
)


def _with_carried(plan: Plan, config: PreTrainedConfig) -> Plan:
    """Return the plan with the tensors of a base that has been downloaded since the plan was made."""
    if plan.carried is not None:
        return plan
    feature_of(plan.build.task).prepare_config(config, plan.build)
    carried = carried_by(plan.build.model, config)
    return replace(plan, carried=carried, notes=(*plan.notes, *_carried_notes(plan.build, carried)))


def _carried_notes(options: BuildOptions, carried: CarriedTensors | None) -> tuple[str, ...]:
    """Return a note on the tensors of the base that the run does not load, unless it saves no model."""
    feature = feature_of(options.task)
    if carried is None or not feature.saves_base(options):
        return ()
    adapts = options.method.type in ("lora", "qlora") and feature.saves_adapter
    note = carried_note(carried, adapts=adapts)
    return (note,) if note else ()


def _base_of(plan: Plan, quantization: str | None) -> TrainedBase:
    """Return the record of the base model that was loaded. quantization: of its files."""
    options = plan.build
    spec = plan.build.model
    folder = Path(spec.model_name_or_path).expanduser()
    fingerprint = None
    revision = None
    if not folder.is_dir():
        snapshot = hub_snapshot(spec.model_name_or_path, spec.revision)
        revision = spec.revision if snapshot is None else snapshot.name
    elif spec.init == "pretrained":
        explicit = read_json(folder / "config.json", RECIPE_MODEL).get("transformers_weights")
        fingerprint = fingerprint_of_files(folder, RECIPE_MODEL, explicit=explicit)
    return TrainedBase(
        name=spec.model_name_or_path,
        dtype=plan.precision.weights,
        stored_as=options.method.stored_as,
        quantization=quantization,
        revision=revision,
        fingerprint=fingerprint,
        rope_parameters=spec.rope_parameters.model_dump(exclude_none=True) or None,
        residual_of=options.method.residual_of,
    )


@contextlib.contextmanager
def _without_outliers(model: nn.Module) -> Iterator[None]:
    """Let each token of 8-bit layers be rounded alone.

    LLM.int8 computes the columns of large activations in 16 bits for all tokens of a row, so documents change each
    other's rounding.
    """
    layers: list[AnyModule] = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    states = [layer.state for layer in layers]
    thresholds = [state.threshold for state in states]
    for state in states:
        state.threshold = 0.0
    try:
        yield
    finally:
        for state, threshold in zip(states, thresholds, strict=True):
            state.threshold = threshold


def _load_and_patch(
    options: BuildOptions,
    config: PreTrainedConfig,
    attention: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    shards: bool = False,
) -> tuple[PreTrainedModel, tuple[KernelLine, ...]]:
    """Return the model with frozen towers and our kernels, and one line per kernel. attention: its name.

    shards: FSDP2 shards the weights, which those in 4 bits need another dtype for.
    """
    feature = feature_of(options.task)
    feature.prepare_config(config, options)
    spec = options.model.model_copy(update={"attn_implementation": attention})
    stored_as = feature.frozen_as(options) or held_as(options.method, options.model, config)
    storage = options.method.bnb_4bit_quant_storage if shards else "uint8"
    model = build_model(
        spec, config, dtype=dtype, device=device, seed=options.seed, stored_as=stored_as, storage=storage
    )
    model = feature.adapt(options, model)
    return model, patch_loaded(model, options)


def patch_loaded(model: AnyModule, options: BuildOptions) -> tuple[KernelLine, ...]:
    """Put our kernels into a loaded model, and what the feature and the modality change; return one line per kernel.

    model: of transformers, or PEFT's wrapper of one with its adapter.
    """
    feature = feature_of(options.task)
    lines: tuple[KernelLine, ...] = ()
    wanted = options.kernels
    if wanted.enabled is not False:
        loss = "torch" if feature.own_loss else wanted.loss
        switches = {"rope": wanted.rope, "norm": wanted.norm, "mlp": wanted.mlp, "mixer": wanted.mixer}
        report = patch(model, **switches, loss=loss, recompute=wanted.recomputed)
        fused = "linear_cross_entropy"
        rows = [row for row in report.rows if not (feature.own_loss and row.kernel == fused)]
        lines = tuple(replace(row, kernel=feature.loss_kernel) if row.kernel == fused else row for row in rows)
    inner = base_of(model)
    feature.patch(inner)
    modality_of(inner.config).prepare(inner, options)
    return lines


def _adapter_notes(options: BuildOptions, model: AnyModule) -> tuple[str, ...]:
    if options.method.type not in ("lora", "qlora"):
        return ()
    from ligertune.models.adapters.adapter_targets import adapter_notes  # imports peft, which takes seconds

    return adapter_notes(model, options.method)


def _with_padding(plan: Plan, config: PreTrainedConfig, why: str) -> Plan:
    """Return the plan with padded batches, and a note that says why."""
    layout = replace(plan.layout, padding_free=False)
    attention, _ = choose_batch_layout(layout, config, plan.machine, plan.precision)
    built = preview_model(plan.build, config, attention, device=plan.machine.device)
    return replace(
        plan,
        attn_implementation=built.attn_implementation,
        attn_why=attention.why,
        rows=replace(plan.rows, padding_free=False, multiple_of=attention.multiple_of),
        notes=(*plan.notes, f"batches are padded: {why}"),
    )
