"""`ligertune doctor`: warnings with their commands, and detection of wrong kernels by `--kernels`."""

import dataclasses
import json

import pytest
import torch
from packaging.requirements import Requirement
from support.command_line import ROOT
from typer.testing import CliRunner

from ligertune.bench.case import function
from ligertune.bench.kernel_check import SIZES, check_ops
from ligertune.bench.measure import BENCHMARKS
from ligertune.cli.app import app
from ligertune.doctor import gpu, host, software
from ligertune.errors import OPTIONAL, pip_install
from ligertune.hardware import Machine

CPU = Machine(
    vendor="cpu", device="cpu", name="a CPU", arch="x86_64", device_count=1, memory_bytes=2**34, has_bfloat16=True,
    peak_flops=None, peak_bandwidth=None, world_size=1, torch_version="2.13.0",
)  # fmt: skip
NVIDIA = dataclasses.replace(CPU, vendor="nvidia", device="cuda", name="NVIDIA H100", arch="sm90", device_count=2)
OLD = dataclasses.replace(NVIDIA, name="Tesla T4", arch="sm75", has_bfloat16=False)
CDNA = dataclasses.replace(NVIDIA, vendor="amd", name="AMD Instinct MI300X", arch="gfx942")
RDNA = dataclasses.replace(CDNA, name="Radeon RX 7900 XTX", arch="gfx1100")


@pytest.mark.parametrize(
    ("torch_version", "triton", "required", "ok"),
    [
        ("2.11.0+cu130", "3.6.0", "3.6.0", True),
        ("2.11.0+cu130", "3.7.1", "3.6.0", False),
        ("2.11.0+rocm7.2", "3.6.0+rocm7.2.git1", "3.6.0+rocm7.2.git1", True),
        ("2.13.0+cpu", "3.7.1", None, True),  # a CPU build requires no triton: the table of tested pairs counts
        ("2.13.0+cpu", "3.8.0", None, False),
        ("2.99.0+cpu", "9.9.0", None, True),  # not in the table
        ("2.13.0+cpu", "", None, True),
    ],
)
def test_torch_and_triton_that_do_not_match_get_a_warning(torch_version, triton, required, ok):
    found = software.pairing(torch_version, triton, required)
    assert found.ok is ok
    assert ok or found.command.startswith("pip uninstall -y torch" if required else "pip install 'triton==3.7.*'")


def test_packages_that_overwrite_each_other_or_are_too_old_get_a_command():
    assert software.triton_owners(["triton"]).ok
    found = software.triton_owners(["triton", "triton-rocm"])
    assert "triton and triton-rocm" in found.advice and "pip uninstall -y torch triton triton-rocm" in found.command
    wanted = Requirement("transformers>=5.17")
    assert software.package("transformers", "5.23.0", wanted).ok
    assert software.package("transformers", "5.9.0", wanted).command == "pip install 'transformers>=5.17'"


@pytest.mark.parametrize(
    ("name", "version", "tested"),
    [
        ("torch", "2.11.0+cu130", True),
        ("torch", "2.15.1", True),
        ("torch", "2.16.0", False),
        ("torch", "2.9.1", False),
        ("transformers", "5.24.3", True),
        ("transformers", "5.25.0.dev0", False),
        ("transformers", "6.0", False),
        ("numpy", "9.9", True),
    ],
)
def test_a_version_outside_of_the_tested_range_is_named(name, version, tested):
    found = software.package(name, version, None)
    assert found.ok and found.value.startswith(version)
    assert ("not tested: the tests ran with" in found.value) is not tested


def test_the_oldest_tested_versions_are_those_that_pyproject_requires():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, (oldest, newest) in software.TESTED.items():
        assert f'"{name}>={oldest}",' in text
        assert f"{name} {oldest} to {newest}" in text
        assert f"{name} {oldest} to {newest}" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_messages_install_what_the_extras_install():
    """Read from pyproject.toml, because the tests run from a checkout that need not be installed."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for name, bound in OPTIONAL.items():
        assert f'"{name}{bound}"' in extras
        assert pip_install(name) == f"pip install '{name}{bound}'"
    assert pip_install("wandb") == "pip install wandb"


def test_bytecode_that_is_not_kept_gets_a_command(tmp_path):
    """Python then compiles torch and transformers in every command."""
    file = tmp_path / "torch" / "__pycache__" / "__init__.cpython-311.pyc"
    missing = software.bytecode(str(file), writes=True)
    assert missing.value == "not kept" and missing.command.endswith(f"-m compileall -q {tmp_path}")
    assert software.bytecode(str(file), writes=False).command == "unset PYTHONDONTWRITEBYTECODE"
    file.parent.mkdir(parents=True)
    file.touch()
    assert software.bytecode(str(file), writes=False).ok


@pytest.mark.parametrize(("triton", "ok"), [("3.6.0", False), ("3.9.0", True), ("", True)])
def test_a_missing_c_compiler_gets_a_warning_if_triton_needs_one(triton, ok, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = software.c_compiler(triton, needed=True)
    assert found.ok is ok and (ok or "gcc" in found.command)
    assert software.c_compiler(triton, needed=False).ok


@pytest.mark.parametrize(
    ("present", "words"), [("", ""), ("nvidia", "an NVIDIA GPU"), ("amd", "an AMD GPU"), ("amd, closed", "/dev/kfd")]
)
def test_a_gpu_that_torch_does_not_see_gets_a_warning(present, words):
    found = gpu.device(CPU, present)
    assert found.ok is not bool(words) and words in found.advice and bool(found.command) is bool(words)
    assert gpu.device(NVIDIA, "nvidia").ok


@pytest.mark.parametrize(
    ("machine", "usable", "absent"),
    [
        (CPU, ["sdpa"], ["varlen", "flex_attention"]),
        (NVIDIA, ["varlen", "flex_attention", "sdpa"], []),
        (OLD, ["sdpa", "flex_attention"], ["varlen: Tesla T4 (sm75) is older than sm80"]),
        (CDNA, ["sdpa", "flex_attention"], ["varlen"]),
    ],
    ids=["cpu", "nvidia", "old", "amd"],
)
def test_attention_implementations_of_a_machine_are_listed(machine, usable, absent):
    listed, _, missing = gpu.attention(machine).value.partition(" (not ")
    assert set(usable) <= set(listed.split(", "))
    assert all(words in missing for words in absent)


@pytest.mark.parametrize(
    ("machine", "variables", "bitsandbytes", "warned"),
    [
        (NVIDIA, {gpu.OVERRIDE: "11.0.0"}, "0.45", []),
        (CDNA, {}, None, []),
        (RDNA, {}, None, ["AOTriton"]),
        (RDNA, {gpu.AOTRITON: "1"}, "0.50.1", []),
        (CDNA, {gpu.OVERRIDE: "9.4.2"}, "0.49.0", [gpu.OVERRIDE, "bitsandbytes"]),
    ],
)
def test_settings_that_amd_gpus_need_get_a_warning(machine, variables, bitsandbytes, warned):
    found = gpu.amd(machine, variables, installed_bitsandbytes=bitsandbytes)
    assert [f.what for f in found if not f.ok] == warned
    assert all(f.command for f in found if not f.ok)


@pytest.mark.parametrize(
    ("arch", "rocm", "triton", "words"),
    [
        ("gfx942", "6.3", "3.7.1+rocm6.3", "Triton 3.7 is reported to fail with ROCm 6.3"),
        ("gfx942", "6.3.4", "3.6.0", ""),
        ("gfx942", "7.2", "3.7.1", ""),
        ("gfx1151", "7.0.2", "3.6.0", "torch.compile is reported to stop the whole machine on gfx1151"),
        ("gfx1151", "7.0", "", "torch.compile is reported"),  # torch does not say which 7.0
        ("gfx1151", "7.0.1", "3.6.0", ""),
        ("gfx1100", "7.0.2", "3.6.0", ""),
        ("gfx1101", "10.0", "3.8.0", "Triton 3.8 of ROCm 10.0 is reported to fail on gfx11"),
        ("gfx1151", "10.0.1", "3.8.0", "Triton 3.8 of ROCm 10.0"),
        ("gfx1201", "10.0", "3.8.0", ""),
        ("gfx1100", "10.0", "3.9.0", ""),
        ("gfx1100", "", "3.8.0", ""),
    ],
)
def test_versions_that_are_known_to_fail_on_amd_gpus_are_named(arch, rocm, triton, words):
    found = gpu.bad_pairs(dataclasses.replace(CDNA, arch=arch), rocm=rocm, triton=triton)
    assert [finding.ok for finding in found] == [False] * bool(words)
    assert all(words in finding.advice and finding.command for finding in found)
    assert not gpu.bad_pairs(NVIDIA, rocm=rocm, triton=triton)


@pytest.mark.parametrize(
    ("version", "hip", "rocm", "expected"),
    [
        ("2.13.0+rocm7.2", "7.2.53211", "7.2.1", "7.2.1"),
        ("2.11.0+rocm7.0.2.lw.git64359f59", "7.0.51831-a3e329ad8", None, "7.0.2"),
        ("2.9.0a0+git1c57644", "7.0.51831-a3e329ad8", None, "7.0"),
        ("2.9.0a0+git1c57644", "7.0.51831", None, "7.0"),
        ("2.13.0+cu130", None, None, ""),
    ],
)
def test_the_version_of_rocm_is_read_from_torch(version, hip, rocm, expected, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "rocm", rocm, raising=False)
    assert gpu.rocm_version() == expected


@pytest.mark.parametrize(
    ("arch", "words"), [("gfx942", "never run"), ("gfx1151", "never run"), ("gfx1030", "not among the chips")]
)
def test_kernels_that_were_never_run_on_this_chip_are_named(arch, words):
    assert words in gpu.amd(dataclasses.replace(CDNA, arch=arch), {}, installed_bitsandbytes=None)[0].value


def test_environment_variables_that_change_a_run_get_a_warning():
    variables = {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "0", "WORLD_SIZE": "2"}
    assert [f.what for f in host.environment(variables, "nvidia")] == ["TRITON_INTERPRET", "WORLD_SIZE"]
    # on a CPU the interpreter is normal
    assert [f.command for f in host.environment(variables, "cpu")] == ["unset WORLD_SIZE"]


def test_a_full_disk_gets_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "LEAST_DISK", 2**62)
    assert "GiB is free" in host.cache(tmp_path / "not" / "there").advice
    assert not host.free_disk("here", tmp_path).ok


def test_the_command_reports_findings_and_kernels_as_json(monkeypatch):
    # Without kernels, the first size of each op is as good as all, and a row of the recurrences as a few chunks.
    for op, sizes in SIZES.items():
        monkeypatch.setitem(SIZES, op, sizes[:1])
    for op in ("document_attention", "causal_conv1d", "gated_delta_rule", "kda", "ssd"):
        monkeypatch.setitem(SIZES, op, ((1, 19),))
    done = CliRunner().invoke(app, ["doctor", "--kernels", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    named = {line["what"] for line in report["findings"]}
    assert {"torch", "device", "driver", "attention", "C compiler", "free disk here", "several processes"} <= named
    assert {check["op"] for check in report["kernels"]} == set(BENCHMARKS)
    assert all(check["ok"] for check in report["kernels"])


@pytest.mark.parametrize("wrong", ["a factor", "not a number", "an exception"])
def test_a_wrong_kernel_fails_the_command(wrong, monkeypatch):
    """One op returns values 5 % too large, NaN, or raises."""

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if wrong == "an exception":
            raise RuntimeError("no kernel image is available")
        return torch.nn.functional.silu(gate) * up * (1.05 if wrong == "a factor" else float("nan"))

    broken = dataclasses.replace(BENCHMARKS["swiglu"], providers=(function("ours", swiglu),))
    monkeypatch.setattr("ligertune.bench.kernel_check.BENCHMARKS", {"swiglu": broken})
    (checks,) = check_ops(torch.device("cpu"), (torch.float32,))
    assert checks and not any(check.good for check in checks)
    json.dumps(checks[0].as_dict(), allow_nan=False)
    done = CliRunner().invoke(app, ["doctor", "--kernels"])
    assert done.exit_code == 1 and "WRONG" in done.output
