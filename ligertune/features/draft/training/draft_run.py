"""Runs of draft heads: choose the draft vocabulary, add the head to its target, and write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ligertune.data.examples import Examples
from ligertune.data.prepare import PreparedData
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.errors import UserError
from ligertune.features.draft.draft_config import DraftConfig, draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.draft_vocabulary import choose_vocabulary, count_trained_tokens
from ligertune.features.draft.files.draft_check import check_written_head
from ligertune.features.draft.files.draft_files import (
    LAYOUTS,
    DraftTarget,
    head_folder,
    read_draft_head,
    write_draft_head,
)
from ligertune.features.draft.files.draft_report import draft_report
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.target_states import StateCapture
from ligertune.features.draft.training.draft_model import DraftModel
from ligertune.features.output_head import PROBED_TOKENS, LogitTransform, backbone_of, check_plain_head, logit_transform
from ligertune.files.storage import read_object
from ligertune.models.score_head import embedding_of
from ligertune.patching.packing_checks import prepare_masks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.features.task import TrainedModel
    from ligertune.planning.options import BuildOptions
    from ligertune.recipe.feature import TaskOptions

NEEDS_PLAIN_HEAD = "A draft head needs a model with a linear output head without a bias, as in Llama."
SAMPLE_SETTINGS = "sample.json"  # that `ligertune sample` writes next to its answers
HEAD = "draft_head."  # prefix of the head's parameters in a DraftModel


def resolve_vocabulary(options: TaskOptions, data: PreparedData) -> Mapping[str, DraftSpec]:
    """Return the section `draft` with the counts of trained tokens, from which a new head's vocabulary is chosen."""
    spec = options.section(DraftSpec)
    examples = data.examples_in_memory
    if spec.draft_vocab_size is None or spec.head_path is not None or examples is None:
        return {}
    return {"draft": spec.with_token_counts(count_trained_tokens(examples))}


def data_notes(options: BuildOptions, data: PreparedData, vocab_size: int) -> tuple[str, ...]:
    """Return notes on who wrote the training data, and on the draft vocabulary.

    Raises UserError if all examples are too short for the last step.
    """
    spec = options.section(DraftSpec)
    for kind, examples in (("training", data.examples_in_memory), ("evaluation", data.eval)):
        if examples is not None:
            _check_last_step(spec.steps, examples, kind)
    model = spec.adapter_path or options.model.model_name_or_path
    others = [dataset.path for dataset in data.options.datasets if not _is_written_by(model, dataset.path)]
    return (*_source_note(others), *_vocabulary_note(spec, vocab_size))


def _check_last_step(steps: int, examples: Examples, kind: str) -> None:
    """Raise UserError if no example has a trained label that the last step predicts: step k starts at label k + 1."""
    if any(bool((example.labels[steps + 1 :] != IGNORE_INDEX).any()) for example in examples):
        return
    raise UserError(
        f"draft.steps: {steps}, and no {kind} example has a trained token after its first {steps + 1}, which is what "
        f"step {steps} predicts.",
        hint="Write fewer steps, or give longer answers.",
    )


def _is_written_by(model: str, path: str) -> bool:
    """Return whether `ligertune sample` wrote a data set with this model, or with the run that it is from."""
    settings = read_object(Path(path).parent / SAMPLE_SETTINGS) or {}
    source = settings.get("source")
    if not isinstance(source, str):
        return False
    answering = Path(source).resolve()
    return source == model or answering in (Path(model).resolve(), *Path(model).resolve().parents)


def _source_note(paths: Sequence[str]) -> tuple[str, ...]:
    if not paths:
        return ()
    return (
        f"draft: it is not known whether the model wrote {', '.join(paths)}; a head that was trained on other texts is "
        "accepted less often. `ligertune sample` writes answers of the model",
    )


def _vocabulary_note(spec: DraftSpec, vocab_size: int) -> tuple[str, ...]:
    """Return a note on the draft vocabulary, if it is smaller than the target's."""
    if not spec.token_counts or spec.draft_vocab_size is None or spec.draft_vocab_size >= vocab_size:
        return ()
    return (choose_vocabulary(spec.token_counts, spec.draft_vocab_size, vocab_size).note(vocab_size),)


def with_draft_head(options: BuildOptions, model: PreTrainedModel) -> DraftModel:
    """Return the model with the head of draft.head_path, or a new one. On the meta device only sizes are checked.

    Raises UserError if the model has no plain output head, or the head differs from the recipe or belongs to another
    model.
    """
    prepare_masks(backbone_of(model))  # DraftModel calls the backbone directly, so its hooks are set there
    weight = check_plain_head(model, hint=NEEDS_PLAIN_HEAD).weight
    on_meta = weight.device.type == "meta"
    spec = options.section(DraftSpec)
    if spec.head_path is None:
        head = new_head(spec, model, weight, seed=options.seed)
    else:
        head = read_draft_head(head_folder(spec.head_path), model.config)
        _check_as_specified(spec, head.config)
    head = head.to(device=weight.device, dtype=embedding_of(model).weight.dtype)
    transform = LogitTransform() if on_meta else _checked_transform(model, head.config)
    recompute = bool(options.execution.gradient_checkpointing)
    return DraftModel(model, head, spec, transform=transform, recompute=recompute)


def _checked_transform(model: PreTrainedModel, config: DraftConfig) -> LogitTransform:
    """Return how the model makes its logits, and check the states that enter its layers on the way."""
    with StateCapture(model, config.layer_ids) as capture:
        transform = logit_transform(model, hint=NEEDS_PLAIN_HEAD)
        capture.check(len(PROBED_TOKENS), config.hidden_size)
    return transform


def new_head(spec: DraftSpec, model: PreTrainedModel, weight: Tensor, *, seed: int) -> DraftHead:
    """Return a random head whose output projection has the rows of the target's (V, E) for its draft vocabulary."""
    config = draft_config_of(
        model.config, draft_vocab_size=spec.draft_vocab_size, layer_ids=spec.layer_ids, num_layers=spec.num_layers
    )
    if len(weight) != config.vocab_size:
        raise UserError(
            f"The output head has {len(weight)} rows, and the configuration a vocab_size of {config.vocab_size}.",
            hint="Draft heads need equal ones: resize the model's embedding to its vocabulary.",
        )
    on_meta = weight.device.type == "meta"
    ids = None
    if config.reduces_vocabulary and not on_meta:
        chosen = choose_vocabulary(spec.token_counts, config.draft_vocab_size, config.vocab_size)
        ids = torch.tensor(chosen.token_ids)
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device("meta" if on_meta else "cpu"):
        torch.manual_seed(seed)
        head = DraftHead(config, ids)
    if not on_meta:
        with torch.no_grad():
            head.lm_head.weight.copy_(weight if ids is None else weight[ids.to(weight.device)])
    return head


def _check_as_specified(spec: DraftSpec, found: DraftConfig) -> None:
    for key, wanted, trained in (
        ("num_layers", spec.num_layers, found.num_layers),
        ("layer_ids", spec.layer_ids or found.layer_ids, found.layer_ids),
    ):
        if wanted != trained:
            raise UserError(
                f"draft.{key}: {wanted}, but the head in {spec.head_path} has {trained}.",
                hint=f"Write draft.{key}: {trained}, or name another head in draft.head_path.",
            )


def save_draft_head(trained: TrainedModel) -> tuple[str, dict[str, Any] | None]:
    """Write `output_dir/draft` on the main rank, in both layouts, and read it back.

    Return the folder, and on the main rank the report on the head.
    """
    plan = trained.plan
    model = trained.model
    assert isinstance(model, DraftModel)  # of `with_draft_head`
    folder = plan.output_dir / "draft"
    report = None
    if trained.is_main:
        weights = trained.weights
        head = model.draft_head
        embedding = embedding_of(model.base_model)
        table = embedding.weight
        if weights is not None:  # gathered: the model's own are shards
            name = next(name for name, module in model.named_modules() if module is embedding)
            table = weights[f"{name}.weight"]
            head = DraftHead(head.config).to(table.dtype)
            head.load_state_dict({name.removeprefix(HEAD): t for name, t in weights.items() if name.startswith(HEAD)})
        target = DraftTarget(model.spec.adapter_path or plan.build.model.model_name_or_path, trained.config, table)
        drafts = model.spec.num_speculative_tokens
        report = draft_report(trained, head)
        rows = report.card_rows()
        for layout in LAYOUTS:
            write_draft_head(head, folder / layout, target, layout=layout, speculative_tokens=drafts, training=rows)
            check_written_head(folder / layout, head, target)
    return str(folder), None if report is None else report.as_dict()
