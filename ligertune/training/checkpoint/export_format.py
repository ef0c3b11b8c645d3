"""`ligertune export --format mxfp4 | fp8`: merge an adapter into a block-scaled base, in the base's own format."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ligertune.errors import UserError, plural
from ligertune.files.base_model import TrainedBase
from ligertune.files.model_files import ADAPTER_CONFIG, hub_snapshot, weight_files
from ligertune.files.storage import new_folder
from ligertune.models.block_scaled.block_format import BlockFormat, block_format
from ligertune.models.block_scaled.write_back import INSTEAD, write_back
from ligertune.models.load import build_model, hide_loading_bars, quantization_of
from ligertune.models.read_config import read_config
from ligertune.models.save import (
    SAVED_MODEL,
    check_same_base,
    read_prompt,
    read_saved_tokenizer,
    saved_spec,
    write_prompt,
)
from ligertune.models.score_head import gives_scores
from ligertune.planning.options import ModelOptions
from ligertune.training.checkpoint.export_run import ExportPlan, plan_export, source_base

FORMATS = ("mxfp4", "fp8")
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".md", ".gguf", ".h5", ".msgpack")  # weights, and the model card


@dataclass(frozen=True)
class FormatExport(ExportPlan):
    """An export in the format of the base. spec: how to load the base; found: its format."""

    spec: ModelOptions | None = None
    base: TrainedBase | None = None
    found: BlockFormat | None = None

    def _write(self) -> str:
        assert self.spec is not None and self.found is not None
        from ligertune.models.adapters.lora import load_adapter  # imports peft, which takes seconds

        hide_loading_bars()
        adapter = Path(self.source.name)
        config = read_config(self.spec, SAVED_MODEL)
        dtype = getattr(torch, self.base.dtype) if self.base is not None else torch.bfloat16
        model = build_model(
            self.spec, config, dtype=dtype, device="cpu", seed=0, stored_as="as in the files", origin=SAVED_MODEL
        )
        adapted = load_adapter(model, str(adapter), SAVED_MODEL)
        files = _base_folder(self.spec)
        with new_folder(self.folder) as aside:
            for file in sorted(files.iterdir()):
                if file.is_file() and file.suffix not in NOT_COPIED and not file.name.startswith("."):
                    shutil.copyfile(file, aside / file.name)
            weights = weight_files(files, SAVED_MODEL, explicit=getattr(config, "transformers_weights", None))
            rounding = write_back(adapted, weights, aside, self.found)
            read_saved_tokenizer(adapter, trust_remote_code=self.trust_remote_code).save_pretrained(aside)
            write_prompt(aside, read_prompt(adapter), self.base)
        return "; ".join(filter(None, [f"{plural(rounding.tensors, 'tensor')} of the base changed", str(rounding)]))


def plan_format_export(
    name: str, out: Path | None, *, wanted: str, checkpoint: str | None, trust_remote_code: bool = False
) -> FormatExport:
    """Return what an export into the format of the base will do. Raises UserError.

    wanted: mxfp4 or fp8, which must be the base's. The rest as of `plan_export`.
    """
    if wanted not in FORMATS:
        raise UserError(f"--format: {wanted} is unknown.", hint=f"Write {' or '.join(FORMATS)}.")
    if checkpoint is not None:
        raise UserError(
            "--format merges a finished adapter, and --checkpoint names a checkpoint.",
            hint="Write the adapter first, with --checkpoint and --adapter, and export that folder.",
        )
    plan = plan_export(name, out, adapter=False, checkpoint=None, trust_remote_code=trust_remote_code)
    folder = Path(plan.source.name)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"--format: {folder} holds a whole model, and no adapter.", hint=INSTEAD)
    spec = saved_spec(str(folder), trust_remote_code=trust_remote_code)
    base = source_base(plan.source)
    if base is not None and base.revision is not None:
        spec = spec.model_copy(update={"revision": base.revision})
    config = read_config(spec, SAVED_MODEL)
    found = block_format(config)
    if found is None or found.name != wanted:
        stored = quantization_of(config) or "no quantised format"
        other = "" if found is None else f" Or write --format {found.name}."
        raise UserError(
            f"--format: {wanted} is not the format of {spec.model_name_or_path}, which is stored in {stored}.",
            hint=INSTEAD + other,
        )
    if gives_scores(config) or (base is not None and base.rope_parameters):
        raise UserError(
            "--format keeps the config.json of the base, and the run has changed it (model.rope_parameters, or a score"
            " head).",
            hint=INSTEAD,
        )
    check_same_base(spec, base)
    return FormatExport(
        source=plan.source,
        folder=plan.folder,
        kind=plan.kind,
        how=plan.how,
        trust_remote_code=trust_remote_code,
        spec=spec,
        base=base,
        found=found,
    )


def _base_folder(spec: ModelOptions) -> Path:
    """Return the folder with the base's files. Raises UserError if they are not on this machine."""
    folder = Path(spec.model_name_or_path).expanduser()
    found = folder if folder.is_dir() else hub_snapshot(spec.model_name_or_path, spec.revision)
    if found is None:
        raise UserError(f"--format: the files of {spec.model_name_or_path} are not on this machine.", hint=INSTEAD)
    return found
