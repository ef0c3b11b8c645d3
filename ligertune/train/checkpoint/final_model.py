"""The trained model on disk: `output_dir/model` in Hugging Face's format, or `output_dir/medusa` for Medusa heads."""

from __future__ import annotations

from accelerate import Accelerator
from torch import Tensor, nn

from ligertune.data.templates.named_templates import read_template
from ligertune.decode.medusa_run import finish_heads, merge_adapter, of_base
from ligertune.files.storage import writing
from ligertune.models.save import write_model
from ligertune.tasks.output_head import adapted_model
from ligertune.train.distributed import full_state_dict
from ligertune.train.loop import TrainResult
from ligertune.train.setup import Job


@writing("The model")
def save_final_model(job: Job, accelerator: Accelerator, fitted: TrainResult) -> tuple[str, dict | None]:
    """Write the trained model or heads; return (their path, the report on heads, which only the main rank has).

    All ranks call it, and the main one writes.
    """
    if job.plan.build.task == "medusa":
        return _save_heads(job, accelerator, fitted.model)
    weights = full_state_dict(accelerator, fitted.model) if fitted.best_weights is None else fitted.best_weights
    return _write_base_model(job, accelerator, accelerator.unwrap_model(fitted.model), weights), None


def _save_heads(job: Job, accelerator: Accelerator, model: nn.Module) -> tuple[str, dict | None]:
    """Write `output_dir/medusa`, and `output_dir/model` if the model was trained with its heads (stage 2)."""
    plan = job.plan
    report = None
    weights = full_state_dict(accelerator, model)
    model = accelerator.unwrap_model(model)
    if plan.build.method.type == "lora" and (weights is None or accelerator.is_main_process):
        weights = merge_adapter(plan, job.config, model, weights)
    if plan.build.medusa.stage == 2:
        _write_base_model(job, accelerator, adapted_model(model.base_model), of_base(weights))
    if accelerator.is_main_process:
        tokenizer = job.tokenizer.tokenizer
        with accelerator.autocast():
            report = finish_heads(plan, model, weights, job.data, tokenizer=tokenizer, prompt=job.prompt)
    accelerator.wait_for_everyone()
    return str(plan.output_dir / "medusa"), None if report is None else report.as_dict()


def _write_base_model(job: Job, accelerator: Accelerator, model: nn.Module, weights: dict[str, Tensor] | None) -> str:
    """Write model, tokenizer, prompt template and image processor on the main rank."""
    folder = job.plan.output_dir / "model"
    template = job.plan.data_options.prompt_template
    tokenizer = job.tokenizer.tokenizer
    if template not in ("auto", "chat", "alpaca"):  # a file or a name: programs that serve the model need it, too
        tokenizer.chat_template = read_template(template)
    if accelerator.is_main_process:
        plan = job.plan
        carried = None if plan.carried is None else (plan.build.model, plan.carried)
        write_model(
            model,
            tokenizer,
            folder,
            state_dict=weights,
            **job.prompt,
            images=job.images,
            base=plan.base,
            carried=carried,
        )
    accelerator.wait_for_everyone()
    return str(folder)
