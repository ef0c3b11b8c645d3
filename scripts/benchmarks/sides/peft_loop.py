"""The side of moe_whole by transformers and PEFT: a plain loop on the rows of ligertune's job, in bf16 or 4 bits."""

from __future__ import annotations

import dataclasses
import time

from benchmarks.tables.moe_whole import ALPHA, ATTENTION, EXPERTS, RANK, WARMUP


def peak_now() -> dict[str, int]:
    """Return the peak bytes of this process: allocated and reserved by torch on a GPU, resident on a CPU."""
    import torch

    from ligertune.training.metrics.meter import resident_peak_bytes

    if not torch.cuda.is_available():
        return {"peak": resident_peak_bytes(), "reserved": resident_peak_bytes()}
    return {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def theirs(job, started: float, *, four_bits: bool) -> dict:
    """Train with transformers and PEFT in a plain loop, on the rows of the job."""
    import torch
    from peft import LoraConfig, get_peft_model

    from benchmarks.sides.trainers import examples_of_steps

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda:0" if cuda else "cpu"), getattr(torch, job.plan.precision.weights)
    job.config._experts_implementation = "grouped_mm"
    model = model_in_4_bits(job, device, dtype) if four_bits else model_in_16_bits(job, device, dtype)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=ATTENTION, target_parameters=EXPERTS,
                      task_type="CAUSAL_LM")  # fmt: skip
    model = get_peft_model(model, lora).train()
    optimizer = optimizer_of(job, [p for p in model.parameters() if p.requires_grad])
    loaded, losses, times = {"load_peak": peak_now()["peak"], "load_seconds": time.perf_counter() - started}, [], []
    for (example,) in examples_of_steps(job):
        ids = torch.tensor(example.input_ids, dtype=torch.int64, device=device)[None]
        begun = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        if cuda:
            torch.cuda.synchronize()
        times.append((ids.numel(), time.perf_counter() - begun))
    counted = times[WARMUP:]
    speed = sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)
    return {**loaded, **peak_now(), "tokens_per_second": speed, "losses": losses}


def model_in_16_bits(job, device, dtype):
    """Return the model with random weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(job.config, dtype=dtype)


@dataclasses.dataclass
class RandomWeight:
    """A weight of a checkpoint that is made on the device when transformers reads it, as `tensor[...]`."""

    shape: tuple[int, ...]
    place: dict
    ones: bool  # of a norm

    def __getitem__(self, everything: object):
        import torch

        value = torch.empty(self.shape, **self.place)
        return value.fill_(1.0) if self.ones else value.normal_(0.0, 0.02)


def model_in_4_bits(job, device, dtype):
    """Return the model with random weights as transformers quantises it: linear layers, and no experts."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(job.config, dtype=dtype)
    place = {"device": device, "dtype": dtype}
    state = {name: RandomWeight(tuple(p.shape), place, p.ndim == 1) for name, p in skeleton.named_parameters()}
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                             bnb_4bit_compute_dtype=dtype)  # fmt: skip
    torch.manual_seed(0)
    return type(skeleton).from_pretrained(
        None, config=job.config, state_dict=state, device_map={"": device}, dtype=dtype, quantization_config=nf4
    )


def optimizer_of(job, parameters: list):
    """Return the optimizer of the recipe, from the package that `ligertune` takes it from."""
    import torch

    group = {"params": parameters, "lr": 1e-4}
    name = job.plan.optimizer.name
    if "8bit" in name:
        import bitsandbytes

        cls = bitsandbytes.optim.PagedAdamW8bit if name.startswith("paged") else bitsandbytes.optim.AdamW8bit
        return cls([group])
    return torch.optim.AdamW([group], fused=True)
