"""Side of the training benchmarks by NVIDIA NeMo AutoModel, on ligertune's weights, token ids and order.

`python -m benchmarks.sides.automodel SIDE RECIPE` trains in this process and prints one point. SIDE is automodel, or
automodel_fused with AutoModel's fused loss. AutoModel's recipe for next-token prediction trains: it loads the model's
folder, adds the adapter, and runs the loop. Its settings are those of NVIDIA's example recipes for Llama.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from benchmarks.sides import trainers
from benchmarks.sides.trainers import StepTimes
from ligertune.data.examples import Example
from ligertune.data.templates.label_masking import IGNORE_INDEX
from ligertune.models.load import build_model
from ligertune.models.read_config import read_config
from ligertune.models.trainable import apply_method
from ligertune.training.setup import Job

MODEL = "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"
ADAPTER = "nemo_automodel.components._peft.lora.PeftConfig"
# side -> loss. NVIDIA's example recipes for Llama name the first one.
LOSSES = {
    "automodel": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    "automodel_fused": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy",
}
COLLATERS = "nemo_automodel.components.datasets.utils"


def main(side: str, recipe: str) -> int:
    return trainers.main(side, recipe, measure)


def measure(job: Job, side: str) -> dict[str, Any]:
    """Train with AutoModel's recipe, and return steps and report."""
    warmup = job.plan.measurement.warmup_steps
    recipe = TimedRecipe(ConfigNode(config_of(job, side)), StepTimes(warmup))
    recipe.setup()
    # the key `clip_grad_norm` has no value that switches clipping off
    recipe.max_grad_norm = job.plan.optimizer.max_grad_norm or None
    model = recipe.model_parts[0]
    if is_adapted(job):
        copy_adapter(job, model)
    recipe.times.on_train_begin()
    recipe.run_train_validation_loop()
    return trainers.result(
        job,
        losses=recipe.losses,
        seconds=recipe.times.seconds(),
        # the first `warmup` steps are not measured
        peak=max(recipe.peaks[warmup:]),
        attention=model.config._attn_implementation,
        setting=setting_of(job, side, model),
    )


class TimedRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """AutoModel's recipe that also keeps time, loss and peak memory of each step."""

    def __init__(self, config: ConfigNode, times: StepTimes) -> None:
        super().__init__(config)
        self.times = times
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def log_train_metrics(self, log_data: Any) -> None:
        """Record the step that has ended. AutoModel's method then resets torch's peak memory."""
        self.losses.append(log_data.metrics["loss"])
        self.peaks.append(trainers.peak_bytes())
        super().log_train_metrics(log_data)
        self.times.on_step_end()


# ---- recipe


def is_adapted(job: Job) -> bool:
    return job.plan.build.method.type != "full"


def config_of(job: Job, side: str) -> dict[str, Any]:
    """Return the configuration of AutoModel's recipe, as NVIDIA's examples write it in YAML."""
    plan = job.plan
    build = plan.build
    method = build.method
    steps = plan.schedule.total_steps
    collater = "neat_packed_collater" if plan.rows.packed else "default_collater"
    config: dict[str, Any] = {
        "seed": build.seed,
        "step_scheduler": {
            "global_batch_size": plan.batching.micro_batch_size * plan.batching.accumulation,
            "local_batch_size": plan.batching.micro_batch_size,
            "max_steps": steps,
            "num_epochs": 1,
        },
        "dist_env": {"backend": "nccl", "timeout_minutes": 1},
        "model": {
            "_target_": MODEL,
            "pretrained_model_name_or_path": str(build.model.model_name_or_path),
            "torch_dtype": plan.precision.weights,
            # examples with an adapter take the class of transformers, the others AutoModel's own
            "force_hf": is_adapted(job),
            "use_liger_kernel": torch.cuda.is_available(),  # AutoModel's default; the kernels need a GPU
        },
        "distributed": {
            "strategy": "fsdp2",
            "activation_checkpointing": bool(build.execution.gradient_checkpointing),
            # AutoModel's default where weights are bfloat16; with --small they are float32
            "mp_policy": {"param_dtype": plan.precision.weights, "reduce_dtype": "float32"},
        },
        "loss_fn": {"_target_": LOSSES[side]},
        "dataset": {"_target_": Rows(job), "tokenizer": None},
        "packed_sequence": {"packed_sequence_size": 0},  # the rows are packed already
        "dataloader": {"collate_fn": f"{COLLATERS}.{collater}", "shuffle": False},
        "optimizer": {
            "_target_": "torch.optim.AdamW",
            "lr": plan.schedule.learning_rate,
            "weight_decay": 0.0,
            "fused": True,
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": str(plan.output_dir / "automodel")},
    }
    if is_adapted(job):
        config["peft"] = {
            "_target_": ADAPTER,
            "target_modules": ["*_proj"],  # all linear layers of Llama's layers
            "dim": method.lora_r,
            "alpha": method.lora_alpha,
            "dropout": method.lora_dropout,
            "use_triton": method.type == "lora" and torch.cuda.is_available(),  # not in NVIDIA's QLoRA example
        }
    if method.type == "qlora":
        config["quantization"] = {
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_compute_dtype": plan.precision.weights,
            "bnb_4bit_use_double_quant": method.bnb_4bit_use_double_quant,
            "bnb_4bit_quant_type": method.bnb_4bit_quant_type,
            "bnb_4bit_quant_storage": plan.precision.weights,
        }
    return config


def setting_of(job: Job, side: str, model: torch.nn.Module) -> str:
    """Return what a reader must know about the settings, with the versions of the packages that took part."""
    method = job.plan.build.method.type
    checkpointing = bool(job.plan.build.execution.gradient_checkpointing)
    said = [
        "its own recipe `TrainFinetuneRecipeForNextTokenPrediction`",
        f"`activation_checkpointing: {str(checkpointing).lower()}`",
        f"`{LOSSES[side].rpartition('.')[-1]}`",
    ]
    packages = ["nemo_automodel", "transformers"]
    if has_liger_kernels(model):
        packages.append("liger_kernel")
    if side == "automodel_fused":
        packages.append("cut_cross_entropy")
    if is_adapted(job):
        said.append("`force_hf: true`")
        said.append("an adapter in the dtype of the weights with the initial weights that PEFT draws from the seed")
    if method == "lora":
        said.append("`use_triton: true`")
    if method == "qlora":
        packages.append("bitsandbytes")
    if job.plan.rows.packed:
        said.append("the same packed rows, by `neat_packed_collater`, with a mask of their documents")
    versions = [f"{name} {version}" for name in packages if (version := trainers.version_of(name))]
    return ", ".join([*said, *versions])


def has_liger_kernels(model: torch.nn.Module) -> bool:
    """Return whether AutoModel has patched layers: where that fails it goes on without liger-kernel."""
    return any(module.forward.__module__.startswith("liger_kernel") for module in model.modules())


# ---- data


class Rows:
    """Dataset of ligertune's rows in its order, with labels that are shifted by one token.

    AutoModel's recipe calls its dataset's target; the call returns the rows themselves.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> list[dict[str, torch.Tensor]]:
        rows = [row for step in trainers.rows_of_steps(self.job) for row in step]
        if self.job.plan.rows.packed:
            return [packed_row(row, self.job.plan.rows.length) for row in rows]
        return [full_row(example) for row in rows for example in row]

    def __deepcopy__(self, memo: dict) -> Rows:
        return self  # a configuration copies its values


def full_row(example: Example) -> dict[str, torch.Tensor]:
    """Return one example. The label of a token is the next token's."""
    return {"input_ids": as_tensor(example.input_ids), "labels": next_labels(example)}


def packed_row(documents: list[Example], length: int) -> dict[str, torch.Tensor]:
    """Return documents in one row of `length` tokens. The attention mask numbers them from 1; padding has 0."""
    used = sum(len(document.input_ids) for document in documents)
    padding = torch.zeros(length - used, dtype=torch.long)
    numbered = [torch.full((len(document.input_ids),), i) for i, document in enumerate(documents, 1)]
    return {
        "input_ids": torch.cat([*(as_tensor(document.input_ids) for document in documents), padding]),
        "labels": torch.cat([*(next_labels(document) for document in documents), padding + IGNORE_INDEX]),
        "position_ids": torch.cat([*(torch.arange(len(document.input_ids)) for document in documents), padding]),
        "attention_mask": torch.cat([*numbered, padding]),
    }


def as_tensor(ids: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.array(ids)).long()


def next_labels(example: Example) -> torch.Tensor:
    """Return the labels shifted by one token; the last token has none."""
    labels = as_tensor(example.labels)
    return torch.cat([labels[1:], labels.new_tensor([IGNORE_INDEX])])


# ---- adapter


@torch.no_grad()
def copy_adapter(job: Job, model: torch.nn.Module) -> None:
    """Give the adapter ligertune's initial weights: AutoModel draws others. Raises ValueError for other layers."""
    drawn = drawn_adapter(job)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if layers.keys() != drawn.keys():
        odd = sorted(layers.keys() ^ drawn.keys())
        raise ValueError(f"AutoModel and PEFT adapt different layers, such as {odd[0]}")
    for name, module in layers.items():
        module.lora_A.weight.copy_(drawn[name])
        module.lora_B.weight.zero_()


def drawn_adapter(job: Job) -> dict[str, torch.Tensor]:
    """Return lora_A of each layer as ligertune draws it. PEFT draws on the CPU, whatever the model's device."""
    build = job.plan.build
    config = read_config(build.model)
    dtype = getattr(torch, job.plan.precision.weights)
    model = build_model(build.model, config, dtype=dtype, device="meta", seed=build.seed)
    # PEFT leaves an adapter of a meta model without weights; those of the base are never touched
    adapted = apply_method(model.to_empty(device="cpu"), build.method, seed=build.seed)
    names = {name: parameter for name, parameter in adapted.named_parameters() if ".lora_A." in name}
    return {
        name.removeprefix("base_model.model.").partition(".lora_A.")[0]: parameter.detach()
        for name, parameter in names.items()
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
