"""Sample many answers in one process: ours, transformers' generate and its generate_batch: scripts/bench sampling.

Models have published sizes and random weights; prompts are random tokens. No token ends an answer, so all sides make
the same number of tokens. Each side runs in a process of its own. Sides that do one batch after the other are timed
over some of their batches, which take as long as the others (--batches).

    scripts/bench sampling --only Llama-3.2-1B --sides "slots 512; generate 256; generate_batch"
    scripts/bench sampling --sides "slots 512" --profile      the kernels of a few steps, with their shares
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import partial

from benchmarks import inputs, pages, processes
from benchmarks.pages import GIB

MODELS = ("Llama-3.2-1B", "Llama-3.1-8B")
# name and number: slots of ours, rows of a batch of generate, answers of generate_batch, which chooses its batches.
SIDES = "slots 512; slots 1024; generate 64; generate 256; generate_static 256; generate_batch 256"
SMALL_SIDES = "slots 4; generate 4"
LENGTHS = (32, 256)  # tokens of a prompt, uniform
WARM_TOKENS = 20  # of each answer of the run before the timed one, which compiles kernels
PROFILED_TOKENS = 48


def main() -> int:
    """Measure all sides of all models, and print their table. Returns 1 if a side failed."""
    options = parse()
    if options.line:
        processes.say(measure(options, *options.line.split("; ")))
        return 0
    points, left_out = [], []
    for model in options.only.split(","):
        for side in options.sides.split("; "):
            command = processes.again("--line", f"{model}; {side}")
            found, reason = processes.run(
                command, limit=options.limit, show=lambda one: print(json.dumps(one), flush=True)
            )
            points += found
            if reason:
                left_out.append(f"Without a row: {model}, {side} ({reason}).")
    if not options.profile:
        publish(options, points, left_out)
    return 1 if left_out else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inputs.add_inputs(parser)
    parser.add_argument("--only", default=",".join(MODELS), help="models")
    parser.add_argument("--sides", help=f"sides, each with its batch (default: {SIDES})")
    parser.add_argument("--prompts", type=int, help="number of prompts (default: 512)")
    parser.add_argument("--answers", type=int, help="answers of a prompt (default: 8)")
    parser.add_argument("--tokens", type=int, help="tokens of an answer (default: 512)")
    parser.add_argument("--batches", type=int, default=1, help="batches that are timed of sides that do one by one")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a side")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a side, and write no page")
    parser.add_argument("--line", metavar="SIDE", help=argparse.SUPPRESS)
    options = pages.parse(parser, partial(pages.joined, keys=("model", "side")))
    if options.small:
        options.only = "stories260K"
    options.sides = options.sides or (SMALL_SIDES if options.small else SIDES)
    options.prompts = options.prompts or (3 if options.small else 512)
    options.answers = options.answers or (2 if options.small else 8)
    options.tokens = options.tokens or (6 if options.small else 512)
    return options


# ---- a side, in its process


def measure(options: argparse.Namespace, name: str, side: str) -> dict:
    """Return tokens/s, peak memory, and the share of the memory-bandwidth floor."""
    import torch

    from ligertune.hardware import this_machine

    kind, _, batch = side.partition(" ")
    model = make_model(options, name)
    prompts = make_prompts(options, model.config.vocab_size)
    run = {"slots": by_slots, "generate": by_generate, "generate_static": by_generate, "generate_batch": by_batch}[kind]
    arguments = {"answers": options.answers, "batch": int(batch or 0), "static": kind == "generate_static"}
    run(model, prompts, WARM_TOKENS, batches=1, **arguments)
    if options.profile:
        return {
            "model": name,
            "side": side,
            "kernels": profiled(lambda: run(model, prompts, PROFILED_TOKENS, batches=1, **arguments)),
        }
    synchronise()
    started = time.perf_counter()
    n_answers = run(model, prompts, options.tokens, batches=options.batches, **arguments)
    synchronise()
    seconds = time.perf_counter() - started
    n_tokens = n_answers * options.tokens
    point = {"model": name, "side": side, "answers": n_answers, "seconds": seconds, "rate": n_tokens / seconds}
    if torch.cuda.is_available():
        point["peak"] = torch.cuda.max_memory_allocated()
    bandwidth = this_machine().peak_bandwidth
    if bandwidth:
        mean_prompt = sum(map(len, prompts)) / len(prompts)
        at_once = int(batch or 0) or n_answers
        point["of_floor"] = floor_seconds(model, n_answers, at_once, mean_prompt, options.tokens, bandwidth) / seconds
    return point


def make_model(options: argparse.Namespace, name: str):
    """Return a model with random weights, of which no token ends an answer."""
    import torch
    import transformers

    if options.small:
        model = transformers.AutoModelForCausalLM.from_pretrained(inputs.TOKENIZER, dtype=torch.float32)
    else:
        config = transformers.AutoConfig.from_pretrained(options.corpus / "model_configs" / name)
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


def make_prompts(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(3, vocabulary) for _ in range(chance.randint(*LENGTHS))] for _ in range(options.prompts)]


def by_slots(
    model, prompts: list[list[int]], tokens: int, *, answers: int, batch: int, batches: int, static: bool
) -> int:
    """Answer all prompts with our engine and kernels. Returns the number of answers."""
    from transformers import AutoTokenizer

    import ligertune
    from ligertune.decode.sampling import Prompt, SamplingSettings, sample_answers

    ligertune.patch(model)
    found = sample_answers(
        model,
        AutoTokenizer.from_pretrained(inputs.TOKENIZER),
        [Prompt(tuple(ids), seed) for seed, ids in enumerate(prompts)],
        SamplingSettings(max_new_tokens=tokens),
        answers_each=answers,
        name="model",
        batch_size=batch,
    )
    return sum(len(answer.ids) == tokens for answer in found)


def by_generate(
    model, prompts: list[list[int]], tokens: int, *, answers: int, batch: int, batches: int, static: bool
) -> int:
    """Answer the first batches, of prompts of similar length, padded on the left. static: compiled, a static cache."""
    import torch

    rows = sorted((ids for ids in prompts for _ in range(answers)), key=len)
    # batches from all lengths, so that their mean is that of all batches
    step = max(1, len(rows) // batch // batches)
    starts = [(step // 2 + step * number) * batch for number in range(batches)]
    done = 0
    for start in starts:
        part = rows[start : start + batch] or rows[-batch:]
        longest = max(map(len, part))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in part], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part], device=model.device)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "eos_token_id": None}
        if static:
            options["cache_implementation"] = "static"
        made = model.generate(input_ids=ids, attention_mask=mask, **options)
        assert made.shape[1] == longest + tokens
        done += len(part)
    return done


def by_batch(
    model, prompts: list[list[int]], tokens: int, *, answers: int, batch: int, batches: int, static: bool
) -> int:
    """Make so many answers (0: all) with transformers' continuous batching, as it chooses its settings."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    if batch:
        prompts = sorted(prompts, key=len)[:: max(1, len(prompts) * answers // batch)]
    # it gives one answer to each input, also with num_return_sequences
    rows = [ids for ids in prompts for _ in range(answers)]
    made = model.generate_batch(inputs=rows, generation_config=config)
    return sum(len(one.generated_tokens) == tokens for one in made.values())


def floor_seconds(model, answers: int, at_once: int, prompt: float, tokens: int, bandwidth: float) -> float:
    """Return the time of reading all weights in each step, and the keys and values of each text before its token."""
    weights = sum(p.nbytes for p in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes  # of which a step reads a row for each token
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    width = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * head_dim * model.dtype.itemsize
    steps = tokens * -(-answers // at_once)
    keys = answers * tokens * (prompt + tokens / 2) * width
    return (steps * weights + keys) / bandwidth


def profiled(call) -> str:
    """Return the kernels that took the time of a call, as torch's table."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        synchronise()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60)
    print(table, flush=True)
    return table


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- the page


def publish(options: argparse.Namespace, points: list[dict], left_out: list[str]) -> None:
    ours = {}
    for point in points:
        if point["side"].startswith("slots"):
            ours[point["model"]] = max(point["rate"], ours.get(point["model"], 0.0))
    rows = []
    for point in points:
        peak = {"peak_gib": point["peak"] / GIB} if "peak" in point else {}
        best = ours.get(point["model"])
        rows.append({**point, **peak, "ratio": best / point["rate"] if best else None})
    pages.publish(
        options,
        page="sampling" + "_small" * options.small,
        title="Sampling of many answers" + " (with --small: a tiny model)" * options.small,
        intro="This page measures `sample_answers` and transformers' two ways to generate, on the same prompts.",
        caveats=[
            f"Published sizes, random weights in bfloat16. {options.prompts:,} prompts of {LENGTHS[0]} to {LENGTHS[1]} "
            f"random tokens, {options.answers} answers each, {options.tokens:,} tokens an answer, temperature 1, no "
            "end token. Seconds include the prompts. A run of a few tokens before compiles kernels.",
            "slots N: ours with its kernels, N answers at a time. generate N: transformers' generate, N rows padded on "
            f"the left, prompts of similar length; timed over {options.batches} of its batches. generate_static N: the "
            "same with a static cache, which transformers compiles. generate_batch N: transformers' continuous "
            "batching, timed over N answers to prompts of all lengths.",
            "The floor reads all weights once a step, and the keys and values of each text once a token, at the data "
            "sheet's bandwidth.",
        ],
        columns=[["model", "model", ""], ["side", "side", ""], ["answers", "answers timed", ",.0f"],
                 ["seconds", "seconds", ".1f"], ["rate", "tokens/s", ",.0f"],
                 ["ratio", "ours at its best / this", ".2f"], ["of_floor", "share of the floor", ".2f"],
                 ["peak_gib", "peak GiB", ".1f"]],
        rows=rows,
        left_out=left_out,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
