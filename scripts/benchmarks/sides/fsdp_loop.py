"""The side of qlora_fsdp2 by bitsandbytes, PEFT and accelerate: a plain loop under FSDP2 on the rows of a job."""

from __future__ import annotations

import time

from benchmarks.sides.peft_loop import peak_now


def under_fsdp(job, started: float) -> dict:
    """Train the job's model with PEFT under accelerate's FSDP2 plugin. All ranks call it. started: by perf_counter."""
    import torch
    from accelerate import Accelerator

    cuda = torch.cuda.is_available()
    plan = job.plan
    plugin = plugin_of()
    accelerator = Accelerator(
        cpu=not cuda, mixed_precision="bf16" if cuda else "no", fsdp_plugin=plugin if cuda else None
    )
    if not cuda:
        allow_on_cpu(accelerator, plugin)
    model = adapted_model(job, accelerator.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = plan.schedule.learning_rate
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=plan.optimizer.weight_decay, fused=cuda)
    model, optimizer = accelerator.prepare(model, optimizer)
    loaded = {"load_peak": peak_now()["peak"], "load_seconds": time.perf_counter() - started}
    losses, seconds, tokens = [], [], []
    for step, rows in enumerate(rows_of_rank(job, accelerator.process_index)):
        if cuda:
            torch.cuda.synchronize()
            if step == plan.measurement.warmup_steps:
                torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        batch = {name: torch.tensor(values, device=accelerator.device) for name, values in rows.items()}
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), plan.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())  # waits for the device
        seconds.append(time.perf_counter() - begun)
        tokens.append(batch["input_ids"].numel() * accelerator.num_processes)
    peak = torch.tensor([float(size) for size in peak_now().values()], device=accelerator.device)
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    first = plan.measurement.warmup_steps
    speed = sum(tokens[first:]) / sum(seconds[first:])
    accelerator.end_training()
    return {**loaded, "peak": peak[0].item(), "reserved": peak[1].item(), "tokens_per_second": speed, "losses": losses}


def plugin_of():
    """Return accelerate's FSDP2 as its documentation configures it: each decoder layer is sharded."""
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )


def allow_on_cpu(accelerator, plugin) -> None:
    """Enable FSDP2 on CPU processes: accelerate refuses it there, although it works with gloo."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def adapted_model(job, device):
    """Return the job's model in 4 bits, without ligertune's kernels, with PEFT's adapters and checkpointed layers."""
    import torch
    from peft import LoraConfig, get_peft_model

    from ligertune.models.load import build_model
    from ligertune.models.read_config import read_config

    build = job.plan.build
    method = build.method
    spec = build.model.model_copy(update={"attn_implementation": "sdpa"})
    dtype = getattr(torch, job.plan.precision.weights)
    model = build_model(spec, read_config(spec), dtype=dtype, device=device, seed=build.seed,
                        stored_as=method.stored_as, storage=method.bnb_4bit_quant_storage)  # fmt: skip
    model.config.use_cache = False
    model.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(r=method.lora_r, lora_alpha=method.lora_alpha, lora_dropout=method.lora_dropout,
                      target_modules=method.lora_target_modules, task_type="CAUSAL_LM")  # fmt: skip
    torch.manual_seed(build.seed)  # the adapter starts as ligertune's
    return get_peft_model(model, lora).train()


def rows_of_rank(job, rank: int):
    """Yield the micro-batch of a rank in each step, in ligertune's order. All rows have the same length."""
    import numpy as np

    from ligertune.data.batching.order import DataOrder

    plan = job.plan
    examples = job.data.train
    steps = plan.schedule.total_steps
    rows = steps * plan.batching.global_batch_size
    order = DataOrder(examples.lengths, total_rows=rows, seed=plan.build.seed, batching=plan.batching, packs=None)
    for step in range(steps):
        (micro,) = order.micro_batches(step, rank)
        found = [examples[int(place)] for row in micro for place in row]
        yield {
            "input_ids": np.stack([one.input_ids for one in found]).astype(np.int64),
            "labels": np.stack([one.labels for one in found]).astype(np.int64),
        }
