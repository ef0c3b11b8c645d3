"""Peak rates by device name, the variables of a launcher, and the free memory of the host."""

import pytest

from ligertune.errors import UserError
from ligertune.hardware import (
    PEAKS,
    available_memory,
    is_first_on_node,
    is_main_process,
    local_rank,
    nodes,
    peak_of,
    total_memory,
    world_size,
)

TB, TFLOP = 1e12, 1e12
# name -> (bandwidth, dense bfloat16) of the device that torch sees; for MI250X that is one of two dies
KNOWN = {
    "NVIDIA H100 80GB HBM3": (3.35, 989), "NVIDIA H100 PCIe": (2.0, 756), "NVIDIA H100 NVL": (3.9, 835),
    "NVIDIA H200": (4.8, 989), "NVIDIA B200": (8.0, 2250), "NVIDIA B300 SXM6 AC": (8.0, 2250),
    "NVIDIA GB200": (8.0, 2500), "NVIDIA A100-SXM4-80GB": (2.039, 312), "NVIDIA A100-SXM4-40GB": (1.555, 312),
    "NVIDIA A100 80GB PCIe": (1.935, 312), "NVIDIA A100-PCIE-40GB": (1.555, 312), "NVIDIA L40S": (0.864, 362),
    "NVIDIA L4": (0.3, 121), "NVIDIA GeForce RTX 4090": (1.008, 165.2), "NVIDIA GeForce RTX 5090": (1.792, 209.5),
    "AMD Instinct MI300X": (5.3, 1307.4), "AMD Instinct MI325X": (6.0, 1307.4), "AMD Instinct MI350X": (8.0, 2306.9),
    "AMD Instinct MI355X": (8.0, 2516.6), "AMD Instinct MI250X/MI250": (1.6, 191.5), "AMD Instinct MI250": (1.6, 181),
    "AMD Instinct MI210": (1.6, 181), "AMD Radeon RX 7900 XTX": (0.96, 122.8),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_peaks_are_those_of_the_data_sheets(name):
    peak = peak_of(name)
    assert (peak.bandwidth, peak.bf16) == pytest.approx((KNOWN[name][0] * TB, KNOWN[name][1] * TFLOP))


def test_every_row_belongs_to_a_device():
    assert {peak_of(name) for name in KNOWN} == set(PEAKS)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA GB300", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300A",
     "NVIDIA GeForce RTX 5090 D", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "AMD Radeon Graphics", "Tesla T4"],
)  # fmt: skip
def test_a_device_with_a_similar_name_has_no_peak(name):
    assert peak_of(name) is None


def test_the_variables_of_a_launcher(monkeypatch):
    assert (world_size(), is_main_process(), is_first_on_node()) == (1, True, True)
    for name, value in {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (world_size(), local_rank(), is_main_process(), is_first_on_node()) == (8, 1, False, False)
    assert nodes() == 1  # not every launcher says how many processes a node has
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert nodes() == 2
    monkeypatch.setenv("WORLD_SIZE", "-1")
    with pytest.raises(UserError, match="WORLD_SIZE is '-1'"):
        world_size()


MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n"
)


@pytest.fixture
def system(tmp_path):
    """system({"meminfo": ...}, {"memory.max": ...}): folders that stand for Linux's /proc and /sys/fs/cgroup."""

    def make(proc: dict[str, str], cgroup: dict[str, str]) -> dict:
        for folder, files in (("proc", proc), ("cgroup", cgroup)):
            for name, text in files.items():
                path = tmp_path / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n", encoding="utf-8")
        return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cgroup"}

    return make


CACHED_FILES = "anon 1\nfile 5000\nactive_file 3000\ninactive_file 2000"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({}, 8_000_000 * 1024),
        ({"memory.max": "max", "memory.current": "5000"}, 8_000_000 * 1024),
        ({"memory.max": "9000", "memory.current": "7000"}, 2000),
        ({"memory.max": "9000", "memory.current": "7000", "memory.stat": CACHED_FILES}, 7000),
        ({"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "7000"}, 2000),
        ({"memory.max": "9000", "memory.current": "9100"}, 0),
    ],
    ids=["no container", "no limit", "a limit", "cached files", "version 1", "above the limit"],
)
def test_available_memory(cgroup, expected, system):
    assert available_memory(**system({"meminfo": MEMINFO}, cgroup)) == expected


def test_available_memory_is_none_if_unknown(system):
    assert available_memory(**system({}, {})) is None


def test_total_memory_is_the_containers_limit(system):
    assert total_memory(system({}, {"memory.max": "9000", "memory.current": "0"})["cgroup"]) == 9000
    assert total_memory(system({}, {"memory.max": "max"})["cgroup"]) > 2**30
