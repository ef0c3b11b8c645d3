"""Peak rates by device name, and the variables of a launcher."""

from __future__ import annotations

import pytest

from ligertune.errors import UserError
from ligertune.hardware import PEAKS, is_first_on_node, is_main_process, peak_of, world_size

TB, TFLOP = 1e12, 1e12
# TB/s and dense bfloat16 TFLOP/s of one torch device, which is one of the two dies of an MI250X
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
def test_peaks_are_those_of_data_sheets(name):
    peak = peak_of(name)
    assert (peak.bandwidth, peak.bf16) == pytest.approx((KNOWN[name][0] * TB, KNOWN[name][1] * TFLOP))


def test_every_row_of_the_table_is_used():
    assert {peak_of(name) for name in KNOWN} == set(PEAKS)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA GB300", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD Instinct MI300A",
     "NVIDIA GeForce RTX 5090 D", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "AMD Radeon Graphics", "Tesla T4"],
)  # fmt: skip
def test_a_device_with_a_similar_name_has_no_peak(name):
    assert peak_of(name) is None


def test_variables_of_a_launcher(monkeypatch):
    assert (world_size(), is_main_process(), is_first_on_node()) == (1, True, True)
    for name, value in {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (world_size(), is_main_process(), is_first_on_node()) == (8, False, False)
    monkeypatch.setenv("WORLD_SIZE", "-1")
    with pytest.raises(UserError, match="WORLD_SIZE is '-1'"):
        world_size()
