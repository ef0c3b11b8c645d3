"""DeepSpeed's ZeRO through accelerate: stage 2 shares gradients and optimizer states, stage 3 the weights, too.

Its engine accumulates, clips and steps by itself, inside the backward of a step's last micro batch.
"""

from __future__ import annotations

import logging
import os

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DistributedType

from ligertune.planning.plan import Plan

VECTORS = 10_000  # elements: stage 3 leaves smaller parameters, which are norms and biases, whole on each rank
STAGES = {"deepspeed_zero2": 2, "deepspeed_zero3": 3}


def zero_plugin(plan: Plan) -> DeepSpeedPlugin:
    """The plan's stage. To be made before the Accelerator, which looks for it in the environment."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    plugin = DeepSpeedPlugin(
        zero_stage=STAGES[plan.strategy],
        gradient_accumulation_steps=1,  # the loop's own: the loss is a part of the global batch's already
        gradient_clipping=plan.optimizer.max_grad_norm,
        zero3_init_flag=False,
        zero3_save_16bit_model=True,
    )
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = plan.batching.micro_batch_size
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = VECTORS
    return plugin


def load_whole_models(accelerator: Accelerator) -> None:
    """Keep transformers from cutting weights while it loads them: kernels are recognised by whole ones."""
    accelerator.state.deepspeed_plugin.dschf = None  # transformers has a weak reference to it


def is_zero(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed's engine does the step."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def grad_norm_of(accelerator: Accelerator) -> torch.Tensor:
    """The norm of all gradients of the step that the engine has taken, before clipping."""
    norm = accelerator.deepspeed_engine_wrapped.get_global_grad_norm()
    return torch.as_tensor(float(norm or 0.0))
