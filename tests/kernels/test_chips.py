"""Launch options: chosen by warp width, within the limits of every chip, known to every backend."""

import dataclasses

import pytest

pytest.importorskip("triton", reason="needs triton: its backends define the options")

from ligertune_kernels.chips import MAX_THREADS, Chip, launch_options
from triton.backends.amd.compiler import HIPOptions
from triton.backends.nvidia.compiler import CUDAOptions

CHIPS = {
    "sm80": 32, "sm90": 32, "sm120": 32, "gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32,
    "gfx1151": 32,  # not among the compiled targets
    "gfx1399": 64,  # does not exist yet
    "other": 16, "wide": 128,
}  # fmt: skip
TILES = (1, 64, 1000, 1024, 2048, 4096, 8192, 16384, 32768, 65536)  # around every step of the table


def chip(arch: str) -> Chip:
    return Chip("amd" if arch.startswith("gfx") else "nvidia", arch, CHIPS[arch], processors=100, l2_bytes=4 << 20)


@pytest.mark.parametrize("arch", CHIPS)
def test_no_program_exceeds_the_threads_of_a_chip(arch):
    for elements in TILES:
        warps = launch_options(elements, chip(arch))["num_warps"]
        assert warps >= 1 and warps & (warps - 1) == 0  # Triton takes powers of two
        assert warps * CHIPS[arch] <= MAX_THREADS


@pytest.mark.parametrize(("listed", "unlisted"), [("gfx1100", "gfx1151"), ("gfx942", "gfx1399")])
def test_an_unlisted_chip_gets_the_options_of_its_warp_width(listed, unlisted):
    assert [launch_options(n, chip(listed)) for n in TILES] == [launch_options(n, chip(unlisted)) for n in TILES]


@pytest.mark.parametrize("backend", [CUDAOptions, HIPOptions])
def test_options_are_known_to_both_backends(backend):
    """NVIDIA refuses options of HIP alone (waves_per_eu, matrix_instr_nonkdim, kpack)."""
    known = {field.name for field in dataclasses.fields(backend)}
    for arch in CHIPS:
        assert set(launch_options(4096, chip(arch))) <= known
