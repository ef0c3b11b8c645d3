"""Host memory: what is available, what a run keeps there, and the note if there is too little."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ligertune.hardware import available_memory, total_memory
from ligertune.planning.make_plan import host_memory_parts, warn_of_host_memory
from ligertune.recipe import load_recipe
from ligertune.run import plan_for

GIB = 2**30
MEMINFO = {"meminfo": "MemTotal: 16000000 kB\nMemFree: 1000000 kB\nMemAvailable: 8000000 kB\nHugePages_Total: 0"}
FILES = "anon 1\nfile 5000\nactive_file 3000\ninactive_file 2000"


@pytest.fixture
def system(tmp_path):
    """system({"meminfo": ...}, {"memory.max": ...}): keyword arguments with folders like Linux' /proc and cgroup."""

    def made(proc: dict[str, str], cgroup: dict[str, str]) -> dict:
        for folder, files in (("proc", proc), ("cgroup", cgroup)):
            for name, text in files.items():
                path = tmp_path / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n", encoding="utf-8")
        return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cgroup"}

    return made


@pytest.mark.parametrize(
    ("proc", "cgroup", "expected"),
    [
        (MEMINFO, {}, 8_000_000 * 1024),
        (MEMINFO, {"memory.max": "max", "memory.current": "5000"}, 8_000_000 * 1024),
        (MEMINFO, {"memory.max": "9000", "memory.current": "7000"}, 2000),
        (MEMINFO, {"memory.max": "9000", "memory.current": "7000", "memory.stat": FILES}, 7000),
        (MEMINFO, {"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "7000"}, 2000),
        (MEMINFO, {"memory.max": "9000", "memory.current": "9100"}, 0),
        ({}, {}, None),
    ],
    ids=["no container", "no limit", "limit", "cached files", "cgroup version 1", "above the limit", "no meminfo"],
)
def test_available_memory_is_within_the_limit_of_a_container(proc, cgroup, expected, system):
    assert available_memory(**system(proc, cgroup)) == expected


def test_total_memory_is_the_limit_of_a_container(system):
    assert total_memory(system({}, {"memory.max": "9000", "memory.current": "0"})["cgroup"]) == 9000
    assert total_memory(system({}, {"memory.max": "max"})["cgroup"]) > GIB


def plan_of(quickstart, tmp_path, *changes: str, gpus: int = 1):
    changes = (*changes, "model.dtype=bfloat16", f"checkpoint.output_dir={tmp_path}")
    recipe = load_recipe(quickstart / "stories260k.yaml", overrides=changes)
    return plan_for(recipe, for_show=True, memory_gib=80, gpus=gpus).plan


def test_each_key_that_uses_host_memory_is_counted(quickstart, tmp_path):
    usual = plan_of(quickstart, tmp_path, "train.gradient_checkpointing=true")
    tokens, states = usual.batching.micro_batch_size * 512, usual.bytes
    assert not host_memory_parts(usual)
    for key, value, expected in (
        ("train.gradient_checkpointing", "offload_both", (5 * tokens * (64 + 172) * 2, 0)),
        ("train.optim_offload", "true", (states.optimizer, 0)),
        ("checkpoint.async_save", "true", (0, states.weights + states.optimizer)),
    ):
        assert host_memory_parts(plan_of(quickstart, tmp_path, f"{key}={value}")) == {f"{key}: {value}": expected}


def test_too_little_memory_is_noted(quickstart, tmp_path):
    plan = plan_of(quickstart, tmp_path, "train.gradient_checkpointing=offload_both", gpus=4)
    [(each, _)] = host_memory_parts(plan).values()
    assert warn_of_host_memory(plan, processes=4, free=4 * each) == plan
    assert warn_of_host_memory(plan, processes=4, free=None) == plan
    *others, note = warn_of_host_memory(plan, processes=4, free=4 * each - 1).notes
    assert others == [*plan.notes] and f"will keep {4 * each / GIB:.1f} GiB there" in note
    assert f"(train.gradient_checkpointing: offload_both, {each / GIB:.1f} GiB per process)" in note
    on_cpu = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, device="cpu"))
    assert warn_of_host_memory(on_cpu, processes=1, free=0) == on_cpu


def test_the_note_names_every_key(quickstart, tmp_path):
    plan = plan_of(quickstart, tmp_path, "train.optim_offload=true", "checkpoint.async_save=true")
    note = warn_of_host_memory(plan, processes=1, free=1).notes[-1]
    assert re.search(r"\(train\.optim_offload: true, .* GiB; checkpoint\.async_save: true, .* GiB\):", note)
