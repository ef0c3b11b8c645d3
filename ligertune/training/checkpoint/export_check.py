"""`ligertune export --check`: compare the logits of the trained model with those of the files that are served.

trained   as ligertune loads it: the run's model, our kernels, the adapter in its layers
saved     the run's `model` folder in plain transformers and PEFT, without our kernels
exported  the folder that `export` writes in plain transformers and PEFT; an adapter is merged there

Models are loaded one after the other, so that one is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ligertune.data.examples import Examples
from ligertune.data.modalities.modality import modality_of
from ligertune.data.prepare import prepare
from ligertune.errors import UserError
from ligertune.files.base_model import StoredAs, stored_bits
from ligertune.files.model_files import ADAPTER_CONFIG
from ligertune.models.load import hide_loading_bars
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.save import (
    SAVED_MODEL,
    base_as_trained,
    initial_of,
    load_plain,
    load_saved,
    load_trained_adapter,
    read_saved_tokenizer,
)
from ligertune.patching.patch import patch
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.options import RunOptions
from ligertune.planning.saved_model import saved_options
from ligertune.recipe.feature import part_of_task
from ligertune.training.checkpoint.export_run import ExportPlan, load_checkpoint, source_base, spec_of_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.models.adapters.four_bit_residual import InitialLora

MAX_ROWS = 4  # rows of the data that are compared
MAX_TOKENS = 128  # tokens of each row
READ_ROWS = 64  # rows of the data set that are prepared; some may be dropped

# Largest relative difference that rounding explains: of the logits' norm, by the dtype of the weights.
TOLERANCES = {
    torch.float32: 1e-4,  # sums in another order
    torch.float16: 1e-2,  # each layer rounds its output to 11 bits, and a merged weight once more
    torch.bfloat16: 5e-2,  # to 8 bits
}


@dataclass(frozen=True)
class LogitsComparison:
    """Logits of a served model against those of the trained one.

    largest: largest absolute difference. relative: norm of the difference divided by that of the trained logits.
    same_argmax: share of the tokens whose most probable next token is the same.
    """

    name: str
    folder: str
    dtype: str
    largest: float
    relative: float
    same_argmax: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains the difference; NaN is no number that it explains."""
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class ExportCheck:
    """The comparisons of an export. compared_on: what the models have read."""

    comparisons: tuple[LogitsComparison, ...]
    compared_on: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the check for the JSON report."""
        rows = [{**asdict(one), "is_equal": one.is_equal} for one in self.comparisons]
        return {"compared_on": self.compared_on, "comparisons": rows, "notes": list(self.notes)}

    def raise_if_different(self) -> None:
        """Raise UserError, with exit code 1, for the first comparison that rounding does not explain."""
        for one in self.comparisons:
            if not one.is_equal:
                raise UserError(
                    f"--check: the {one.name} in {one.folder} computes other logits than the trained one: the relative"
                    f" difference is {one.relative:.1e}, and rounding in {one.dtype} explains {one.tolerance:.0e}.",
                    hint="Do not serve it. Is the base model the one of the training?",
                    exit_code=1,
                )


def check_export(plan: ExportPlan, *, prompt: str | None = None) -> ExportCheck:
    """Compare the trained model of a written export with the saved and the exported one.

    prompt: text to compare on; None: rows of the run's data. Raises UserError if there is nothing to compare on.
    """
    hide_loading_bars()
    source = Path(plan.source.name)
    options = saved_options(plan.source.run or source)
    rows, compared_on = _rows(plan, options, prompt)
    with _autocast(plan, options):
        expected = logits(patched(_trained_model(plan, options)), rows)
    served = [] if plan.source.is_checkpoint else [("saved adapter" if _is_adapter(source) else "saved model", source)]
    if plan.folder.resolve() != source.resolve():
        served.append((f"exported {plan.kind}", plan.folder))
    comparisons = []
    for name, folder in served:
        base = _base_of_adapter(plan, options, folder) if _is_adapter(folder) and options is not None else None
        model = load_plain(folder, trust_remote_code=plan.trust_remote_code, base=base)
        comparisons.append(compare_logits(name, folder, model, rows, expected))
        del model, base
    notes = []
    if options is not None and (note := feature_of(options.build.task).export_note):
        notes.append(note)
    if stored_as := _stored_as(options):
        bits = stored_bits(stored_as)
        where = f"the dequantised {bits}-bit weights"
        notes.append(f"adapters are compared on {where}; on the 16-bit weights logits differ.")
    return ExportCheck(tuple(comparisons), compared_on, tuple(notes))


def patched(model: nn.Module) -> nn.Module:
    """Return the model with our kernels."""
    patch(model)
    return model


@torch.no_grad()
def logits(model: nn.Module, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits (T, V) of each row (T,), or its scores (1, labels), in float32 in host memory."""
    device = next(model.parameters()).device
    found = (model.eval()(input_ids=row[None].to(device)).logits for row in rows)
    return [one.reshape(-1, one.shape[-1]).float().cpu() for one in found]  # of a score head (1, labels)


def compare_logits(
    name: str, folder: Path, model: nn.Module, rows: Sequence[Tensor], expected: Sequence[Tensor]
) -> LogitsComparison:
    """Compare a model's logits with the expected ones (T, V) of each row."""
    found = torch.cat(logits(model, rows))
    truth = torch.cat(list(expected))
    # The coarsest of several dtypes: a float32 adapter computes in the bfloat16 of its base.
    dtype = max((p.dtype for p in model.parameters() if p.dtype in TOLERANCES), key=TOLERANCES.__getitem__)
    difference = found - truth
    return LogitsComparison(
        name=name,
        folder=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        largest=float(difference.abs().max()),
        relative=float(difference.norm() / truth.norm()),
        same_argmax=float((found.argmax(-1) == truth.argmax(-1)).float().mean()),
        tolerance=TOLERANCES[dtype],
    )


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def _stored_as(options: RunOptions | None) -> StoredAs | None:
    return None if options is None else options.build.method.stored_as


def _trained_model(plan: ExportPlan, options: RunOptions | None) -> nn.Module:
    """Return the model as it was trained, with its adapter in the layers."""
    source = Path(plan.source.name)
    trust = plan.trust_remote_code
    if plan.source.is_checkpoint:
        return load_checkpoint(plan.source, trust_remote_code=trust)
    if options is None or not _is_adapter(source):
        return load_saved(str(source), trust_remote_code=trust)[0]
    if options.build.model.init == "random":
        raise UserError(
            "--check: model.init: random made the base model, which the run has not saved.",
            hint="Give the base model's folder to the recipe instead.",
        )
    from ligertune.patching.lora.fused_lora import fuse_adapters  # imports peft, which takes seconds

    base = source_base(plan.source)
    model = _on_device(_base(plan, options, initial_of(source, base)))
    adapted = load_trained_adapter(model, source, base)
    if options.build.kernels.fuses_lora:
        fuse_adapters(adapted)
    return adapted.get_base_model()


def _autocast(plan: ExportPlan, options: RunOptions | None) -> torch.autocast:
    """Return the autocast of training: the adapter of a checkpoint is float32, and computes in the base's bfloat16."""
    base = source_base(plan.source) if plan.source.is_checkpoint else None
    adapts = options is not None and options.build.method.type in ("lora", "qlora")
    is_half = adapts and base is not None and base.dtype == "bfloat16"
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, enabled=is_half)


def _base_of_adapter(plan: ExportPlan, options: RunOptions, folder: Path) -> PreTrainedModel:
    """Return the base model on which a saved adapter gives the logits of training."""
    initial = initial_of(folder, source_base(plan.source))
    model = _base(plan, options, initial)
    if initial is not None:  # the saved adapter subtracts it again
        from ligertune.models.adapters.four_bit_residual import add_initial  # imports peft, which takes seconds

        add_initial(model, initial)
    return model


def _base(plan: ExportPlan, options: RunOptions, initial: Mapping[str, InitialLora] | None = None) -> PreTrainedModel:
    """Return the base model as the run trained it, in transformers' own classes: its dtype, its dequantised weights."""
    base = source_base(plan.source)
    spec = spec_of_base(options.build, base, trust_remote_code=plan.trust_remote_code)
    config = read_config(spec, SAVED_MODEL)
    feature_of(options.build.task).prepare_config(config, options.build, SAVED_MODEL)
    return base_as_trained(spec, config, base, initial=initial)


def _on_device(model: PreTrainedModel) -> PreTrainedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device)  # type: ignore[arg-type]  # the type of transformers' decorated `to` lacks self


# ---- what the models read


def _rows(plan: ExportPlan, options: RunOptions | None, prompt: str | None) -> tuple[list[Tensor], str]:
    """Return token ids (T,) of some rows, and their description."""
    if prompt is not None:
        tokenizer = read_saved_tokenizer(plan.folder, trust_remote_code=plan.trust_remote_code)
        ids = tokenizer(prompt, return_tensors="pt").input_ids[0, : MAX_ROWS * MAX_TOKENS]
        return [ids], f"{len(ids)} tokens of the prompt"
    ask = "Give a text with --prompt."
    if options is None:
        raise UserError(f"--check: {plan.source.name} belongs to no run, so it has no data to compare on.", hint=ask)
    modality = modality_of(read_config(options.build.model, SAVED_MODEL))
    if not modality.is_text:
        raise UserError(f"--check: the run's data may hold {modality.inputs}, which are not compared.", hint=ask)
    part = part_of_task(options.build.task)
    datasets = options.data_options.datasets
    first = datasets[0].model_copy(update={"max_samples": min(datasets[0].max_samples or READ_ROWS, READ_ROWS)})
    few = {"datasets": (first,), "eval_datasets": (), "val_split": 0.0, "streaming": False, "num_proc": 1}
    data = prepare(
        options.data_options.model_copy(update=few),
        load_tokenizer(options.build.model).tokenizer,
        seed=options.build.seed,
        rows=part.rows(options.build),
        label_options=part.labels(options.build),
    )
    assert isinstance(data.train, Examples)  # `few` switches streaming off
    chosen = data.train.select(range(min(MAX_ROWS, len(data.train))))
    rows = [torch.from_numpy(row.documents()[0].input_ids[:MAX_TOKENS].astype("int64")) for row in chosen]
    if not rows:
        raise UserError(f"--check: the first {READ_ROWS} rows of {first.path} give no example.", hint=ask)
    return rows, f"{sum(map(len, rows))} tokens of {len(rows)} rows of {first.path}"
