"""What a run keeps on the host, and whether there is room for it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ligertune.hardware import available_memory, total_memory
from ligertune.planning.memory.pinned_memory import host_memory_parts, warn_of_host_memory
from ligertune.recipe import load_recipe
from ligertune.run import plan_for

GIB = 2**30
MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n"
)


@pytest.fixture
def system(tmp_path):
    """system({"meminfo": ...}, {"memory.max": ...}): folders as Linux shows itself in."""

    def made(proc: dict[str, str], cgroup: dict[str, str]) -> dict:
        for folder, files in (("proc", proc), ("cgroup", cgroup)):
            for name, text in files.items():
                path = tmp_path / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n", encoding="utf-8")
        return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cgroup"}

    return made


FILES = "anon 1\nfile 5000\nactive_file 3000\ninactive_file 2000"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({}, 8_000_000 * 1024),
        ({"memory.max": "max", "memory.current": "5000"}, 8_000_000 * 1024),
        ({"memory.max": "9000", "memory.current": "7000"}, 2000),
        ({"memory.max": "9000", "memory.current": "7000", "memory.stat": FILES}, 7000),
        ({"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "7000"}, 2000),
        ({"memory.max": "9000", "memory.current": "9100"}, 0),
    ],
    ids=["no container", "no limit", "a limit", "files", "version 1", "over it"],
)
def test_what_can_be_had(cgroup, expected, system):
    assert available_memory(**system({"meminfo": MEMINFO}, cgroup)) == expected


def test_a_system_that_does_not_say(system):
    assert available_memory(**system({}, {})) is None


def test_a_containers_limit_is_all_there_is(system):
    assert total_memory(system({}, {"memory.max": "9000", "memory.current": "0"})["cgroup"]) == 9000
    assert total_memory(system({}, {"memory.max": "max"})["cgroup"]) > GIB


def plan_of(quickstart, tmp_path, *changes: str, gpus: int = 1):
    changes = (*changes, "model.dtype=bfloat16", f"checkpoint.output_dir={tmp_path}")
    recipe = load_recipe(quickstart / "stories260k.yaml", overrides=changes)
    return plan_for(recipe, for_show=True, memory_gib=80, gpus=gpus).plan


def test_what_is_kept_there(quickstart, tmp_path):
    parts = {}
    for change in (
        "train.gradient_checkpointing=true",
        "train.gradient_checkpointing=offload_both",
        "train.optim_offload=true",
        "checkpoint.async_save=true",
    ):
        plan = plan_of(quickstart, tmp_path, change)
        parts[change] = host_memory_parts(plan)
    waits, offloaded, saved = parts.pop("train.gradient_checkpointing=offload_both"), *(
        parts.pop(f"{key}=true") for key in ("train.optim_offload", "checkpoint.async_save")
    )  # fmt: skip
    assert all(not found for found in parts.values())
    tokens, states = plan.batching.micro_batch_size * 512, plan_of(quickstart, tmp_path).bytes
    assert waits == {"train.gradient_checkpointing: offload_both": (5 * tokens * (64 + 172) * 2, 0)}
    assert offloaded == {"train.optim_offload: true": (states.optimizer, 0)}
    assert saved == {"checkpoint.async_save: true": (0, states.weights + states.optimizer)}


def test_too_little_is_said_before_anything_is_loaded(quickstart, tmp_path):
    plan = plan_of(quickstart, tmp_path, "train.gradient_checkpointing=offload_both", gpus=4)
    [(each, _)] = host_memory_parts(plan).values()
    assert warn_of_host_memory(plan, processes=4, free=4 * each) == plan
    assert warn_of_host_memory(plan, processes=4, free=None) == plan
    *others, note = warn_of_host_memory(plan, processes=4, free=4 * each - 1).notes
    assert others == [*plan.notes] and f"will keep {4 * each / GIB:.1f} GiB there" in note
    assert f"(train.gradient_checkpointing: offload_both, {each / GIB:.1f} GiB per process)" in note


def test_all_that_takes_it_is_named(quickstart, tmp_path):
    plan = plan_of(quickstart, tmp_path, "train.optim_offload=true", "checkpoint.async_save=true")
    note = warn_of_host_memory(plan, processes=1, free=1).notes[-1]
    assert re.search(r"\(train\.optim_offload: true, .* GiB; checkpoint\.async_save: true, .* GiB\):", note)


def test_a_cpu_keeps_it_where_it_is(quickstart, tmp_path):
    plan = plan_of(quickstart, tmp_path, "train.gradient_checkpointing=offload")
    assert warn_of_host_memory(plan, processes=1, free=0) != plan
    plan = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, device="cpu"))
    assert warn_of_host_memory(plan, processes=1, free=0) == plan
