"""Train a model of Llama-3-8B's sizes: seconds to the first step, scaling over GPUs, saved models, and adapters.

    scripts/bench scaling [--processes 1,2,4] [--only speed,served,resumed,lora,qlora] [--model FOLDER] [--small]

FOLDER holds random weights (16 GB); it is made if it is missing. The data are packed real records; weights and AdamW
states are bfloat16, with gradient checkpointing, and FSDP2 on several GPUs. Each run is `ligertune train` in new
processes.

speed    rows of 512 and of 4,096 tokens: losses and tokens/s of N processes and of one with the same global batch, and
         the seconds before the first step. --together runs in parallel on free GPUs; the run on one GPU is then made
         on every GPU at once, and its rate is their mean.
served   the model that the most processes save, loaded by transformers: its logits are bit-equal to those of the
         trained model in the processes (without kernels, so that both compute the same operations).
resumed  a run on the most processes, resumed after 2 of 4 steps on half of them: its losses are those of all.
lora     an adapter, merged by `ligertune export` and loaded by PEFT: the same logits up to rounding.
qlora    the same on weights of four bits.

--small runs a small model on CPU processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB

RECIPE = inputs.QUICKSTART / "stories260k.yaml"
BASE = {
    "model.dtype": "bfloat16",
    "data.val_split": 0,
    "data.on_overlength": "truncate",
    "train.learning_rate": 1e-5,
    "train.gradient_checkpointing": "true",
    "logging.logging_steps": 1,
    "checkpoint.save_strategy": "no",
    "checkpoint.save_model": "false",
    "report.warmup_steps": 3,
}
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 128256, "num_hidden_layers": 32, "rope_theta": 500_000.0,
         "max_position_embeddings": 131072}  # fmt: skip
SMALL = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "vocab_size": 1024, "num_hidden_layers": 2}  # fmt: skip
LENGTHS = {512: 64, 4096: 8}  # tokens of a row: rows of a micro-batch
SMALL_LENGTHS = {256: 2, 512: 1}
WORKER = "LIGERTUNE_BENCH_8B_WORKER"


def main() -> int:
    options = parse()
    if os.environ.get(WORKER):
        return train_and_show_logits(Path(os.environ[WORKER]))
    parts = {"speed": speed, "served": served, "resumed": resumed, "lora": adapter, "qlora": adapter}
    out = options.out or Path(tempfile.mkdtemp(prefix="ligertune-bench-8b-"))
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    options.model = large_model(options.model or out / "weights", small=options.small)
    print(f"model: {time.perf_counter() - began:.0f} s, {options.model}", flush=True)
    rows = []
    for name in options.only.split(","):
        began = time.perf_counter()
        good, said = parts[name](options, out / name)
        rows.append(f"{name:8s} {'ok' if good else 'FAILED':7s} {time.perf_counter() - began:4.0f} s  {said}")
        print(rows[-1], flush=True)
    print("\n" + "\n".join(rows) + f"\n{time.strftime('%Y-%m-%d')}")
    return int(any(" FAILED " in row for row in rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", help="comma-separated numbers of processes (default: 1 and all GPUs)")
    parser.add_argument("--only", default="speed,served,resumed")
    parser.add_argument("--steps", type=int, default=10, help="steps of the timed runs")
    parser.add_argument("--batch", type=float, default=1.0, help="factor of the rows of a micro-batch (speed)")
    parser.add_argument("--lengths", help="comma-separated lengths of rows (speed; default: 512,4096)")
    parser.add_argument("--together", action="store_true", help="run in parallel on separate GPUs (speed)")
    parser.add_argument("--model", type=Path, help="folder of the model; made if it is missing")
    parser.add_argument("--out", type=Path, help="keep recipes, logs and reports here")
    parser.add_argument("--small", action="store_true")
    options = pages.parse(parser)
    if options.processes is None and not os.environ.get(WORKER):
        import torch

        options.processes = f"1,{2 if options.small else max(2, torch.cuda.device_count())}"
    options.counts = sorted(int(n) for n in (options.processes or "1").split(","))
    return options


# ---- benchmarks


def speed(options: argparse.Namespace, folder: Path) -> tuple[bool, str]:
    good, said, runs, table = True, [], {}, []
    for length, rows in (SMALL_LENGTHS if options.small else LENGTHS).items():
        if options.lengths and str(length) not in options.lengths.split(","):
            continue
        rows = max(1, round(rows * options.batch))
        shared = {"data.max_length": length, "train.per_device_train_batch_size": rows,
                  "train.global_batch_size": rows * options.counts[-1], "train.max_steps": options.steps}  # fmt: skip
        for n in options.counts:
            for copy in range(len(visible_gpus()) if options.together and n == 1 else 1):
                place = folder / f"{length}-on-{n}{'-again' * bool(copy)}{copy or ''}"
                runs[length, rows, n, copy] = functools.partial(train, options, place, n, **shared)
    found = on_free_gpus(runs) if options.together else {key: run() for key, run in runs.items()}
    for length, rows in dict.fromkeys(key[:2] for key in runs):
        reports = {n: found[length, rows, n, 0] for n in options.counts}
        first, rates = options.counts[0], {n: mean_rate(found, (length, rows, n)) for n in options.counts}
        for n, report in reports.items():
            off = furthest(report["losses"], reports[first]["losses"])
            good &= off < 1e-2
            peak = report["peak_memory"].get("reserved_run", report["peak_memory"]["allocated_run"]) / GIB
            spent = report["seconds_to_first_step"]
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items())
            share = 100 * rates[n] * first / (n * rates[first])
            busiest = 100 * uneven(folder / f"{length}-on-{n}", n, options.steps)
            said.append(
                f"{rows} rows of {length} on {n}: {rates[n]:,.0f} tokens/s, {share:.1f} % of {n // first} x one, peak "
                f"{peak:.1f} GiB, the busiest process has {busiest:.1f} % more tokens than the mean, losses of "
                f"{len(report['losses'])} steps within {off:.1e}; first step after {report['to_first_step']:.1f} s "
                f"from the command ({phases}; longest without a word {report['silence']:.1f} s)"
            )
            print(f"  {said[-1]}", flush=True)
            gpus = "1 GPU" if n == 1 else f"{n} GPUs"
            table.append({"batch": f"{rows} x {length:,}", "gpus": gpus, "ours": True, "peak_gib": peak,
                          "tokens_per_second": rates[n], "share": share / 100, "losses": off})  # fmt: skip
    page(options, table)
    return good, "\n                      ".join(said)


def page(options: argparse.Namespace, table: list[dict]) -> None:
    """Publish the page of `speed`."""
    first = f"{options.counts[0]} GPU" + "s" * (options.counts[0] > 1)
    pages.publish(
        options,
        count=options.counts[-1],
        page="scaling" + "_small" * options.small,
        title="Scaling of Llama-3-8B" + " (with --small: a small model)" * options.small,
        intro="This page shows tokens/s and peak memory of full fine-tuning on different numbers of GPUs.",
        caveats=[
            "ligertune only: no other tool was measured. Weights are random.",
            f"Each run was made once: {options.steps} steps, of which {BASE['report.warmup_steps']} are not counted.",
            "The data are packed real records. Activation checkpointing is on, and several GPUs use FSDP2.",
            "The global batch of a micro-batch is the same on all numbers of GPUs, so fewer GPUs accumulate gradients.",
            *(["Runs with fewer GPUs ran at the same time on the free GPUs of the host."] * options.together),
        ],
        columns=[["batch", "micro-batch, rows x tokens", ""], ["gpus", "GPUs", ""],
                 ["tokens_per_second", "tokens/s of all GPUs", ",.0f"],
                 ["share", f"of linear scaling from {first}", ".1%"],
                 ["peak_gib", "peak GiB reserved per GPU", ".1f"]],
        rows=table,
        remarks=[f"Losses are within {max(row['losses'] for row in table):.0e} of those of {first}, relative."],
        chart={"kind": "bars", "labels": ["gpus"], "group": "batch", "values": {
            "tokens_per_second": "tokens/s of all GPUs (more is better)",
            "peak_gib": "peak memory per GPU, GiB (less is better)"}},
    )  # fmt: skip


def uneven(folder: Path, n: int, steps: int) -> float:
    """Return the relative excess of tokens of the busiest of n processes over the mean, in the timed steps of a run."""
    from ligertune.data.batching.order import DataOrder
    from ligertune.data.batching.packing import pack
    from ligertune.recipe import load_recipe
    from ligertune.training.resolve import plan_for

    elsewhere = [f"checkpoint.output_dir={folder / 'order'}"]
    job = plan_for(load_recipe(folder / "run" / "resolved_recipe.yaml", overrides=elsewhere))
    batching, lengths = job.plan.batching, job.data.train.lengths  # planned for one process
    batching = dataclasses.replace(batching, world_size=n, accumulation=batching.accumulation // n)
    order = DataOrder(lengths, total_rows=steps * batching.global_batch_size, seed=job.plan.build.seed,
                      batching=batching, packs=pack(lengths, job.plan.rows.length))  # fmt: skip
    busiest = mean = 0.0
    for step in range(BASE["report.warmup_steps"], steps):
        for micro in zip(*(order.micro_batches(step, rank) for rank in range(n)), strict=True):
            tokens = [sum(int(lengths[row].sum()) for row in rows) for rows in micro]
            busiest, mean = busiest + max(tokens), mean + statistics.mean(tokens)
    return busiest / mean - 1


def mean_rate(found: dict[tuple[int, int, int, int], dict], run: tuple[int, int, int]) -> float:
    """Return the mean tokens per second of the copies of a run."""
    return statistics.mean(r["throughput"]["tokens_per_second"] for key, r in found.items() if key[:3] == run)


def visible_gpus() -> list[str]:
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return names.split(",")


def on_free_gpus(runs: dict[tuple[int, int, int, int], Callable[..., dict]]) -> dict[tuple[int, int, int, int], dict]:
    """Start each run when enough GPUs are free. Runs on few GPUs take longest and start first.

    The key of a run is (length of rows, rows, GPUs, copy). Copy i of a run on one GPU uses GPU i.
    """
    names, waiting, found = visible_gpus(), sorted(runs, key=lambda key: key[2]), {}
    copied = {key[:3] for key in runs if key[3]}
    free, going = list(names), {}
    with ThreadPoolExecutor() as pool:
        while waiting or going:
            for key in waiting:
                mine = [names[key[3]]] if key[:3] in copied else free[: key[2]]
                if set(mine) <= set(free) and len(mine) == key[2]:
                    break
            else:
                if not going:
                    raise SystemExit(f"{waiting[0][2]} GPUs are needed, and {len(free)} are visible.")
                for done in wait(going, return_when=FIRST_COMPLETED).done:
                    key, mine = going.pop(done)
                    found[key] = done.result()
                    rate = found[key]["throughput"]["tokens_per_second"]
                    print(f"  {key[1]} rows of {key[0]} on GPU {','.join(mine)}: {rate:,.0f} tokens/s", flush=True)
                    free = [name for name in names if name in {*free, *mine}]
                continue
            waiting.remove(key)
            free = [name for name in free if name not in mine]
            going[pool.submit(runs[key], more={"CUDA_VISIBLE_DEVICES": ",".join(mine)})] = key, mine
    return found


def served(options: argparse.Namespace, folder: Path) -> tuple[bool, str]:
    """Compare the logits of a saved model with those of the trained model before it is released."""
    import torch
    from transformers import AutoModelForCausalLM

    n = options.counts[-1]
    recipe = write_recipe(options, folder, **{"train.max_steps": 3, "train.per_device_train_batch_size": 1,
                                              "kernels.enabled": "false", "model.attn_implementation": "sdpa",
                                              "data.packing": "false", "parallel.strategy": "fsdp"})  # fmt: skip
    began = time.perf_counter()
    call([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-port", "29533",
          str(processes.RUNNER), "scaling"], folder, more={WORKER: str(recipe)})  # fmt: skip
    seconds = time.perf_counter() - began
    found = torch.load(folder / "logits.pt")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # as ligertune: both sides use the same attention kernel
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder / "run" / "model", dtype=torch.bfloat16, output_loading_info=True, attn_implementation="sdpa"
    )
    with torch.no_grad():
        logits = model.to(device).eval()(found["ids"].to(device)).logits.cpu()
    off = float((logits.float() - found["logits"].float()).abs().max())
    odd = {key: value for key, value in loading.items() if value}
    scale = float(found["logits"].float().abs().max())
    del model
    processes.release_memory()
    return off == 0 and not odd, (
        f"trained and saved on {n} in {seconds:.0f} s; logits of {tuple(logits.shape)} differ by at most {off} "
        f"(largest {scale:.1f}); keys missing or unexpected: {odd or 'none'}"
    )


def train_and_show_logits(path: Path) -> int:
    """Train and save as `ligertune train` does, in each process, and keep the logits of the trained model."""
    import torch

    from ligertune.attention.torch_attention import prefer_flash
    from ligertune.launcher.signals import StopRequest
    from ligertune.progress import Display, Phases
    from ligertune.recipe import load_recipe
    from ligertune.training.build import trained_model
    from ligertune.training.checkpoint.final_model import save_final_model
    from ligertune.training.checkpoint.output_dir import begin_output
    from ligertune.training.loop import fit
    from ligertune.training.parallel.distributed import reshard, start_accelerator
    from ligertune.training.resolve import plan_for
    from ligertune.training.setup import Custom, start

    job = plan_for(load_recipe(path))
    prefer_flash()
    accelerator = start_accelerator(job.plan)
    if accelerator.is_main_process:
        begin_output(job.plan)
    accelerator.wait_for_everyone()
    model, _ = trained_model(job.plan, job.config, accelerator)
    with StopRequest(enabled=False) as stop:
        training = start(job, accelerator, model, show=lambda line: None, display=Display(), custom=Custom())
        fitted = fit(training, stop=stop, phases=Phases())
    ids = torch.arange(5, 133)[None]
    with torch.no_grad():
        logits = fitted.model.eval()(ids.to(accelerator.device)).logits.cpu()
    reshard(fitted.model)
    save_final_model(job, accelerator, fitted)
    if accelerator.is_main_process:
        torch.save({"ids": ids, "logits": logits}, path.parent / "logits.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return 0


def resumed(options: argparse.Namespace, folder: Path) -> tuple[bool, str]:
    n = options.counts[-1]
    shared = {"train.per_device_train_batch_size": 1, "train.global_batch_size": n, "train.max_steps": 4,
              "checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2}  # fmt: skip
    whole = train(options, folder / "all", n, **shared)
    checkpoint = folder / "all" / "run" / "checkpoints" / "step-2"
    shared |= {"checkpoint.resume_from_checkpoint": checkpoint, "checkpoint.save_strategy": "no"}
    half = train(options, folder / "half", max(1, n // 2), **shared)
    off = furthest(half["losses"], whole["losses"][2:])
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    shutil.rmtree(folder / "all" / "run" / "checkpoints")
    return off < 1e-2, f"{n} -> {max(1, n // 2)} processes from {size / GIB:.1f} GiB, losses within {off:.1e}"


def adapter(options: argparse.Namespace, folder: Path) -> tuple[bool, str]:
    """Compare the logits of the merged adapter and of PEFT's with exact ones: both may differ by rounding only."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    report = train(options, folder, 1, **{"method.type": folder.name, "data.max_length": 512 if options.small else 4096,
                                          "train.per_device_train_batch_size": 1, "train.max_steps": options.steps,
                                          "train.learning_rate": 1e-3, "checkpoint.save_model": "true"})  # fmt: skip
    began = time.perf_counter()
    call([sys.executable, "-m", "ligertune", "export", str(folder / "run"), "--out", str(folder / "merged")], folder)
    merging = time.perf_counter() - began
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    ids = torch.arange(5, 133, device=device)[None]
    ways = {"base": (options.model, torch.bfloat16), "exact": (options.model, torch.float32),
            "merged": (folder / "merged", torch.bfloat16)}  # fmt: skip
    for name, (path, dtype) in ways.items():
        kind = {"quantization_config": four_bits(dtype)} if folder.name == "qlora" and name != "merged" else {}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device, **kind).eval()
        with torch.no_grad():
            if name != "exact":
                found[name] = model(ids).logits.float()
            if name != "merged":
                model = PeftModel.from_pretrained(model, folder / "run" / "model").eval()
                found["adapter" if name == "base" else name] = model(ids).logits.float()
        del model
        processes.release_memory()
    exact = found.pop("exact")
    learned, rounding, off = (
        float((found[name] - exact).norm() / exact.norm()) for name in ("base", "adapter", "merged")
    )
    rate, peak = report["throughput"]["tokens_per_second"], report["peak_memory"]["allocated_run"] / GIB
    return off < 2 * rounding and off < learned / 2 and report["losses"][-1] < report["losses"][0], (
        f"{rate:,.0f} tokens/s, peak {peak:.1f} GiB, loss {report['losses'][0]:.3f} -> {report['losses'][-1]:.3f}, "
        f"first step after {report['to_first_step']:.1f} s; merged in {merging:.0f} s; relative distance from the "
        f"logits of PEFT in float32: {rounding:.1e} in bfloat16, {off:.1e} merged, {learned:.1e} without the adapter"
    )


def four_bits(dtype: object) -> object:
    """Return the configuration with which ligertune loads four-bit weights, computing in `dtype`."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
                              bnb_4bit_use_double_quant=True)  # fmt: skip


# ---- helpers


def settings_of(options: argparse.Namespace, folder: Path, **changes: object) -> dict[str, object]:
    return {**BASE, "data.max_length": 512, "model.model_name_or_path": options.model,
            "checkpoint.output_dir": folder / "run", **changes}  # fmt: skip


def write_recipe(options: argparse.Namespace, folder: Path, **changes: object) -> Path:
    """Write a recipe for processes other than `ligertune train`."""
    from ligertune.recipe import dump_recipe, load_recipe

    folder.mkdir(parents=True, exist_ok=True)
    pairs = [f"{key}={value}" for key, value in settings_of(options, folder, **changes).items()]
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(load_recipe(RECIPE, overrides=pairs)), encoding="utf-8")
    return path


def train(
    options: argparse.Namespace, folder: Path, processes: int, *, more: dict[str, str] | None = None, **changes: object
) -> dict:
    """Train; return the report with the losses, the seconds to the first step and the longest time without output."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"parallel.num_processes": processes, "parallel.strategy": "fsdp" if processes > 1 else "single"}
    settings = settings_of(options, folder, **own, **changes)
    command = [sys.executable, "-m", "ligertune", "train", str(RECIPE)]
    said = call([*command, *inputs.override_arguments(settings)], folder, more=more)
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    report["losses"] = [line["loss"] for line in lines if "loss" in line]
    begun = next(at for at, line in said if line.startswith("first step ..."))
    end = begun + report["seconds_to_first_step"]["first step"]
    moments = [0.0, *(at for at, _ in said if at < end), end]
    report["to_first_step"] = end
    report["silence"] = max(after - before for before, after in pairwise(moments))
    return report


def call(command: list[str], folder: Path, *, more: dict[str, str] | None = None) -> list[tuple[float, str]]:
    """Run a command. Returns each line of its output with its time in seconds, which log.txt keeps, too."""
    environment = processes.environment(PYTHONUNBUFFERED="1", **(more or {}))
    said, began = [], time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
                          cwd=folder) as process:  # fmt: skip
        for line in process.stdout:
            said.append((time.perf_counter() - began, line))
    (folder / "log.txt").write_text("".join(f"{at:8.2f} {line}" for at, line in said), encoding="utf-8")
    if process.returncode:
        raise SystemExit("".join(line for _, line in said)[-4000:])
    return said


def furthest(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference; infinity if the numbers of losses differ."""
    if len(found) != len(expected):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def large_model(folder: Path, *, small: bool) -> Path:
    """Make a folder with random bfloat16 weights of Llama-3-8B's sizes and the quickstart's tokenizer, if missing.

    small: a model of two layers, for a machine without a GPU.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**(SMALL if small else SIZES)), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # leave the memory to the processes that train
    for path in inputs.TOKENIZER.glob("*token*"):
        shutil.copy(path, folder)
    return folder
