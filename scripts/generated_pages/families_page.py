"""The page docs/families.md: every family of the installed transformers with and without kernels.

Each entry of transformers' tables of causal and of image-text models is built small with random weights, in a process
of its own. It is patched, and compared with the unpatched model: loss, gradient of every parameter, logits, greedy
generation. Unpatched again, it must give the same bits as before.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import transformers
from support.models.family_check import TOLERANCE, FamilyResult, check_family
from support.models.tiny_families import class_name, families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
SECONDS, MEMORY = 300, 8 << 30  # limits of one family; the memory is address space


TEXT = """
# Model families

This page compares every model family of transformers with and without kernels, each as a tiny random model on a CPU.
`scripts/support_matrix --families` writes it.

transformers {transformers}, torch {torch}: {summary}

The script compares the loss, the gradient of every parameter, the logits and greedy generation. `difference` is the
largest of their differences, relative to the largest value; up to {tolerance:.0e} counts as the same, since the kernels
sum in another order. After `unpatch` each model gave the same bits as before.

Image-text models got text only, unless they need an image. `norm`, `RoPE`, `MLP`, `mixer` and `loss` count the modules
that a kernel computes and those that are left as they are; the note says why. MLPs without a gate do not need a kernel.
Mixers are those of [hybrid models](hybrids.md): recurrences and convolutions.
"Logits are made": the family changes its logits before the loss, so the loss is not fused with the output head.

{headline}

| model type | table | class | norm | RoPE | MLP | mixer | loss | difference | outcome | note |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}

## Not built

These need a package, sizes or inputs that the script does not have, or cannot be trained alone.

| model type | table | class | reason |
|---|---|---|---|
{missing}
"""


def compare(names: list[str], processes: int) -> list[FamilyResult]:
    """Compare families by model type, or all. Raises ValueError if transformers has none of the names."""
    chosen = [family for family in families() if not names or family[1] in names]
    if not chosen:
        raise ValueError(f"transformers {transformers.__version__} has no model type {', '.join(names)}")
    results = run_all(chosen, processes)
    print(f"{summary(outcomes(results))}\n{headline(results)}", file=sys.stderr)
    return results


def outcomes(results: list[FamilyResult]) -> Counter[str]:
    return Counter(result.outcome for result in results)


def run_all(chosen: list[tuple[str, str]], processes: int) -> list[FamilyResult]:
    """Check families, some at a time, each in a fork of this process."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    waiting, running, results = list(chosen), {}, []
    while waiting or running:
        while waiting and len(running) < processes:
            family = waiting.pop(0)
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(target=_check_in_fork, args=(*family, writer))
            process.start()
            writer.close()
            running[reader] = family, process, time.monotonic()
        ended = wait(list(running), timeout=1.0)
        for reader, (family, process, started) in list(running.items()):
            if reader in ended or time.monotonic() - started > SECONDS:
                results.append(_result_of(reader if reader in ended else None, family))
                process.kill()
                process.join()
                del running[reader]
                print(f"{len(results)}/{len(chosen)} {family[1]}: {results[-1].outcome}", file=sys.stderr, flush=True)
    return sorted(results, key=lambda result: chosen.index((result.kind, result.model_type)))


def _check_in_fork(kind: str, model_type: str, writer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    writer.send(check_family(kind, model_type))


def _result_of(reader: Connection | None, family: tuple[str, str]) -> FamilyResult:
    about = *family, class_name(*family)
    if reader is None:
        return FamilyResult(*about, "crashes", f"not done after {SECONDS} s")
    try:
        return reader.recv()
    except EOFError:
        return FamilyResult(*about, "crashes", "its process died")


def summary(counts: Counter[str]) -> str:
    total = counts.total()
    return (
        f"{total} {'entry' if total == 1 else 'entries'}: {counts['same']} the same with kernels, "
        f"{counts['differs']} different, {counts['crashes']} crashed, {counts['not built']} not built."
    )


def headline(results: list[FamilyResult]) -> str:
    """Return how many dense causal families have all four kinds of layers patched, and what the others lack."""
    counted = [result for result in results if result.counts]
    lacking = [result for result in counted if result.lacks]
    share = f" ({100 * (len(counted) - len(lacking)) / len(counted):.0f} %)" if counted else ""
    others = "; the others lack:" if lacking else "."
    lines = [
        f"Of {len(counted)} dense causal families with norms, RoPE and a gated MLP, "
        f"{len(counted) - len(lacking)}{share} have all of their norms, RoPE, MLPs and the loss patched{others}"
    ]
    lines += [f"- `{result.model_type}`: {_escaped(_lacks(result))}" for result in lacking]
    return f"{lines[0]}\n" + "".join(f"\n{line}" for line in lines[1:])


def _lacks(result: FamilyResult) -> str:
    return "; ".join(f"{kind}: {state.why or state}" for kind, state in result.lacks.items())


def page(results: list[FamilyResult]) -> str:
    """Return the page."""
    counts = outcomes(results)
    compared = [result for result in results if result.outcome != "not built"]
    rows = [
        f"| `{r.model_type}` | {r.kind} | {r.class_name} | {' | '.join(_cells(r))} "
        f"| {r.error:.0e} | {r.outcome} | {_escaped(_note(r))} |"
        for r in compared
    ]
    missing = [
        f"| `{r.model_type}` | {r.kind} | {r.class_name} | {_escaped(r.note)} |"
        for r in results
        if r.outcome == "not built"
    ]
    text = TEXT.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        summary=summary(counts),
        headline=headline(results),
        tolerance=TOLERANCE,
        rows="\n".join(rows),
        missing="\n".join(missing),
    )
    return text.lstrip()


def _cells(result: FamilyResult) -> list[str]:
    return [str(result.layers.get(kind, "")) for kind in ("norm", "rope", "MLP", "mixer", "loss")]  # a crash has none


def _note(result: FamilyResult) -> str:
    reasons = [f"{kind}: {state.why}" for kind, state in result.layers.items() if state.why]
    return "; ".join([result.note] * bool(result.note) + reasons)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
