"""The trained model on disk: `output_dir/model` in Hugging Face's format, or what the feature writes instead."""

from __future__ import annotations

from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ligertune.any_types import AnyModule
from ligertune.data.templates.bounded_jinja import read_template
from ligertune.features.task import TrainedModel
from ligertune.files.storage import writing
from ligertune.models.save import write_model
from ligertune.planning.feature_spec import feature_of
from ligertune.training.metrics.train_result import TrainResult
from ligertune.training.parallel.distributed import full_state_dict, trained_state_dict
from ligertune.training.setup import Job


@writing("The model")
def save_final_model(job: Job, accelerator: Accelerator, fitted: TrainResult) -> tuple[str, dict[str, Any] | None]:
    """Write the trained model or heads; return (their path, the report on heads, which only the main rank has).

    All ranks call it, and the main one writes.
    """
    save = feature_of(job.plan.build.task).save
    if save is not None:
        trained = _trained_model(job, accelerator, fitted.model)
        written = save(trained)
        accelerator.wait_for_everyone()
        return written
    gather = trained_state_dict if job.plan.bytes.saves_adapter else full_state_dict
    weights = gather(accelerator, fitted.model) if fitted.best_weights is None else fitted.best_weights
    return _write_base_model(job, accelerator, accelerator.unwrap_model(fitted.model), weights), None


def _trained_model(job: Job, accelerator: Accelerator, model: nn.Module) -> TrainedModel:
    """Return the model of the last step, with what a feature needs to write it."""
    return TrainedModel(
        plan=job.plan,
        config=job.config,
        data=job.data,
        tokenizer=job.tokenizer.tokenizer,
        prompt=job.prompt,
        weights=full_state_dict(accelerator, model),
        model=accelerator.unwrap_model(model),
        is_main=accelerator.is_main_process,
        autocast=accelerator.autocast,
        write=partial(_write_base_model, job, accelerator),
    )


def _write_base_model(job: Job, accelerator: Accelerator, model: AnyModule, weights: dict[str, Tensor] | None) -> str:
    """Write model, tokenizer, prompt template and image processor on the main rank."""
    folder = job.plan.output_dir / "model"
    template = job.plan.data_options.prompt_template
    tokenizer = job.tokenizer.tokenizer
    # programs that serve the model need a template that is a file or a name, too
    if template not in ("auto", "chat", "alpaca", "plain"):
        tokenizer.chat_template = read_template(template)
    if accelerator.is_main_process:
        plan = job.plan
        carried = None if plan.carried is None else (plan.build.model, plan.carried)
        write_model(
            model,
            tokenizer,
            folder,
            state_dict=weights,
            prompt=job.prompt,
            reader=job.reader,
            base=plan.base,
            carried=carried,
        )
    accelerator.wait_for_everyone()
    return str(folder)
