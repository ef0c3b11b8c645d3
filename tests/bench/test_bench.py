"""`ligertune bench`: lower bounds, errors against float64, failing and overwriting providers, the command."""

import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import ligertune_kernels
import pytest
import torch
from ligertune_kernels.table import OPS
from support.script_modules import script_module
from typer.testing import CliRunner

from ligertune.bench import accuracy
from ligertune.bench.case import Case, Provider, Rates, function
from ligertune.bench.clock import Timing, measured_rates
from ligertune.bench.measure import BENCHMARKS, BenchSetup, Repetitions, Row, bench, bench_setup, cases_of
from ligertune.cli.app import app
from ligertune.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
H100 = Rates(copy=3.0e12, matmul=792e12)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def cpu() -> BenchSetup:
    return bench_setup(torch.device("cpu"), FP32, Repetitions(warmup=0, repeats=3, seconds=0.01))


def run(case: Case, cpu: BenchSetup, *providers: Provider, **options) -> dict[str, Row]:
    """Return the rows of a case by provider; providers: use these only."""
    benchmark = BENCHMARKS[case.op]
    if providers:
        benchmark = dataclasses.replace(benchmark, providers=providers)
    (rows,) = bench([case], cpu, benchmarks={case.op: benchmark}, chosen=lambda p: p.name != "torch.compile", **options)
    return {row.provider: row for row in rows}


def test_every_op_has_a_benchmark():
    assert set(BENCHMARKS) == {op.name for op in OPS}


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.slow if op in ("gated_delta_rule", "kda", "ssd") else ()) for op in BENCHMARKS],
)
def test_every_provider_of_an_op_computes_the_same(op, cpu):
    """Outputs and gradients in float32 against float64, at all sizes for a CPU."""
    for case in cases_of(op, dtype=FP32, small=True):
        for name, row in run(case, cpu).items():
            assert row.failure is None, f"{name}: {row.failure}"
            assert row.errors
            assert row.error < 1e-6, f"{name}: {row.errors}"


@pytest.mark.parametrize("options", [{"frozen_head": True}, {"ignored": 0.5}], ids=str)
def test_frozen_heads_and_ignored_labels_of_the_fused_loss(options, cpu):
    rows = run(Case("linear_cross_entropy", (64, 16, 100), FP32, **options), cpu)
    assert ("gradient of weight" in rows["ours"].errors) == ("frozen_head" not in options)
    assert max(row.error for row in rows.values()) < 1e-6


@pytest.mark.parametrize(
    "case, milliseconds",
    [
        (Case("linear_cross_entropy", (8192, 4096, 128256), BF16), 32.6),
        (Case("linear_cross_entropy", (8192, 4096, 128256), BF16, frozen_head=True), 21.7),
        (Case("linear_cross_entropy", (8192, 4096, 128256), BF16, ignored=0.8), 6.5),
        (Case("linear_jsd", (4096, 2048, 4096, 128256), BF16), 13.6),
        (Case("cross_entropy", (8192, 32000), BF16), 0.349),
        (Case("rms_norm", (8192, 4096), BF16), 0.112),
        (Case("add_rms_norm", (8192, 4096), BF16), 0.179),
        (Case("gated_rms_norm", (8192, 4096), BF16), 0.179),
        (Case("layer_norm", (8192, 16384), BF16), 0.447),
        (Case("apply_rope", (8192,), BF16), 0.112),
        (Case("swiglu", (8192, 14336), BF16), 0.625),
        (Case("geglu", (8192, 24576), BF16), 1.07),
        (Case("kl_div", (8192, 32000), FP32), 1.05),
        (Case("jsd", (4096, 128256), FP32), 2.1),
    ],
    ids=lambda value: f"{value.op} {value.label}" if isinstance(value, Case) else str(value),
)
def test_lower_bounds_are_the_published_ones(case, milliseconds):
    """Published for these sizes at 3.0 TB/s and 792 TFLOP/s."""
    assert 1e3 * BENCHMARKS[case.op].work(case).floor("both", H100) == pytest.approx(milliseconds, rel=0.005)


@pytest.mark.parametrize("op", [op for op, benchmark in BENCHMARKS.items() if benchmark.row_args])
def test_float64_results_by_parts_equal_those_of_the_whole(op, monkeypatch):
    """Losses and gradients of weights are summed; outputs and gradients of rows are concatenated.

    A float8 copy by columns has a row for each column, and zeros where its rows are padded to a multiple of 16.
    """
    benchmark = BENCHMARKS[op]
    case = cases_of(op, dtype=FP32, small=True)[-1]
    torch.manual_seed(0)
    args = benchmark.inputs(case, torch.device("cpu"))
    whole = accuracy.truth(benchmark, case, args)
    monkeypatch.setattr(accuracy, "PART_ELEMENTS", 5 * max(case.sizes[1:]))  # five rows per part, fewer in the last
    parts = accuracy.truth(benchmark, case, args)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_an_output_that_is_one_percent_too_large_or_nan_has_that_error(factor, cpu):
    wrong = function("wrong", lambda gate, up: torch.nn.functional.silu(gate) * up * torch.tensor(factor))
    row = run(Case("swiglu", (8, 300), FP32), cpu, wrong)["wrong"]
    assert row.error == pytest.approx(factor - 1, rel=1e-3, nan_ok=True)
    assert row.errors == {
        name: pytest.approx(factor - 1, rel=1e-3, nan_ok=True)
        for name in ("output 0", "gradient of gate", "gradient of up")
    }


def test_a_failing_provider_is_a_row_with_its_reason(cpu):
    def refuse(gate, up):
        raise RuntimeError("not on this machine\nand more")

    rows = run(Case("swiglu", (8, 300), FP32), cpu, function("peer", refuse), BENCHMARKS["swiglu"].providers[0])
    assert rows["peer"].failure == "RuntimeError: not on this machine"
    assert not rows["peer"].device
    assert rows["ours"].failure is None
    assert rows["ours"].device["both"].median > 0


def test_an_overwriting_provider_has_separate_arguments(cpu):
    def spoil(gate, up):
        y = torch.nn.functional.silu(gate) * up
        gate.detach().zero_()
        return y

    spoiling = Provider("spoiling", lambda case, args: lambda: spoil(*args), overwrites=True)
    rows = run(Case("swiglu", (8, 300), FP32), cpu, spoiling, BENCHMARKS["swiglu"].providers[0])
    assert rows["ours"].error < 1e-6


def test_every_pass_runs_within_the_providers_context(cpu):
    """Forward and backward, when checked and when timed; the context is left afterwards."""
    inside, seen = [], {"forward": [], "backward": []}

    @contextlib.contextmanager
    def within():
        inside.append(True)
        yield
        inside.clear()

    def watched(x, weight):
        y = torch.nn.functional.rms_norm(x, weight.shape, weight)
        seen["forward"].append(bool(inside))
        y.register_hook(lambda dy: seen["backward"].append(bool(inside)))
        return y

    provider = dataclasses.replace(function("watched", watched), within=within)
    row = run(Case("rms_norm", (4, 16), FP32), cpu, provider)["watched"]
    assert row.failure is None and set(row.device) == {"forward", "backward", "both"}
    assert all(map(all, seen.values())) and min(map(len, seen.values())) >= 6 and not inside


def test_each_round_of_timing_has_another_order(cpu):
    seen = []

    def watched(name):
        def provider(x, weight):
            seen.append(name)
            return torch.nn.functional.rms_norm(x, weight.shape, weight)

        return function(name, provider)

    names = ["a", "b", "c", "d"]
    eight_rounds = dataclasses.replace(cpu, repetitions=Repetitions(warmup=0, repeats=8, seconds=60.0))
    rows = run(Case("rms_norm", (4, 16), FP32), eight_rounds, *map(watched, names), modes=("forward",))
    assert list(rows) == names
    rounds = [tuple(seen[-start : len(seen) - start + 4]) for start in range(4, 36, 4)]
    assert all(sorted(each) == names for each in rounds) and len(set(rounds)) > 4


def test_timing_has_median_and_quantiles():
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Timing(median=3.5, p20=2.0, p80=5.0)


def test_warm_up_is_not_timed_and_rates_count_bytes_read_and_written():
    seconds = itertools.chain([9.0], itertools.repeat(1.0))
    clock = SimpleNamespace(time=lambda run, *expected: (run(), (next(seconds), 1.0))[1])
    setup = BenchSetup(torch.device("cpu"), FP32, clock, H100, Repetitions(warmup=1, repeats=3, seconds=60.0))
    ours = BENCHMARKS["swiglu"].providers[0]
    row = run(Case("swiglu", (8, 300), FP32), setup, ours, modes=("forward",))["ours"]
    assert row.device["forward"] == Timing(1.0, 1.0, 1.0)
    assert measured_rates(setup.device, clock, FP32) == Rates(copy=2 * 2**24, matmul=2 * 512**3)


def command(*words: str):
    return CliRunner().invoke(app, ["bench", *words])


def test_the_command_prints_a_table_and_json(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `plots`")
    done = command("rms_norm", "swiglu", "--without", "torch.compile", "--json", "--plots", str(tmp_path))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {row["op"] for row in found["rows"]} == {"rms_norm", "swiglu"}
    for row in found["rows"]:
        assert row["failure"] is None
        assert set(row["device_seconds"]) == {"forward", "backward", "both"}
        assert row["device_seconds"]["both"]["p20"] <= row["device_seconds"]["both"]["p80"]
        for mode, share in row["share_of_roofline"].items():
            assert share > 0
            assert share == pytest.approx(row["floor_seconds"][mode] / row["device_seconds"][mode]["median"])
    assert "Roof: share of the device's peak rate." in done.stderr
    for op in ("rms_norm", "swiglu"):
        assert (tmp_path / f"{op}.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_op_is_an_error_that_lists_the_ops():
    done = command("rmsnorm")
    assert isinstance(done.exception, UserError)
    assert "'rmsnorm'" in str(done.exception)
    assert "rms_norm" in str(done.exception)


def test_plots_without_matplotlib_are_refused_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = command("swiglu", "--plots", str(tmp_path))
    assert isinstance(done.exception, UserError)
    assert "pip install 'matplotlib>=3.8'" in str(done.exception)
    assert done.output == ""


def test_the_script_prints_its_table(tmp_path, monkeypatch, capsys):
    chosen = ["--only", "swiglu,rms_norm", "--without", "torch.compile"]
    writes = ["--out", str(tmp_path), "--page", str(tmp_path / "pages"), "--commit", "1234567"]
    monkeypatch.setattr(sys, "argv", ["bench", "kernels", "--small", *writes, *chosen])
    script_module("benchmarks.ops.kernels").main()
    said = capsys.readouterr().out
    assert "| `swiglu` 64x300 |" in said
    assert "Host time of one forward + backward of `rms_norm`" in said
    rows = json.loads((tmp_path / "bench_kernels.json").read_text(encoding="utf-8"))["rows"]
    assert {"ours", "eager"} <= {row["provider"] for row in rows}
    (page,) = (json.loads(line) for line in said.splitlines() if line.startswith('{"page": '))
    assert page["command"] == shlex.join(["scripts/bench", "kernels", "--small", *chosen])  # no path of this machine
    assert [row["op"] for row in page["rows"]] == ["`rms_norm`", "`swiglu`"] and page["commit"] == "1234567"
    assert {column[0] for column in page["columns"]} >= {"op", "size", "ligertune", "eager"}
    assert len(list((tmp_path / "pages").glob("kernels_small_*.md"))) == 1


@pytest.fixture
def kernel_forms():
    return script_module("benchmarks.tables.kernel_forms")


def test_every_option_of_the_ops_that_models_use_in_several_forms_is_measured(kernel_forms):
    usual = {"inplace"}  # timed by the rows of the kernels benchmark without --forms
    for op in kernel_forms.KINDS:
        kernel, forms = getattr(ligertune_kernels, op), [form for form in kernel_forms.FORMS if form.op == op]
        hints, given = get_type_hints(kernel), {name for form in forms for name in form.options}
        for name, parameter in inspect.signature(kernel).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name not in usual:
                assert name in given, f"{op}: no form has {name}"
                chosen = {form.options.get(name, parameter.default) for form in forms}
                values = set(get_args(hints[name])) if get_origin(hints[name]) is Literal else set()
                assert values <= chosen, f"{op}: no form has {name} {values - chosen}"
            elif type(None) in get_args(hints[name]) and name != "position_ids":  # a table of positions is not a form
                assert any(name not in form.args for form in forms), f"{op}: no form is without {name}"


@pytest.mark.slow
def test_the_script_measures_all_forms(kernel_forms, tmp_path, monkeypatch, capsys):
    writes = ["--out", str(tmp_path), "--page", str(tmp_path / "pages")]
    monkeypatch.setattr(sys, "argv", ["bench", "kernels", "--small", "--forms", "--without", "torch.compile", *writes])
    assert script_module("benchmarks.ops.kernels").main() == 0
    said = capsys.readouterr().out.splitlines()
    labels = [form.label for form in kernel_forms.FORMS]
    assert len(set(labels)) == len(labels)
    assert said[-1].startswith(f"{len(labels)} forms: ") and said[-1].endswith(" 0 failed, 0 not run")
    assert [line.split(" | ")[0].removeprefix("| ") for line in said[-1 - len(labels) : -1]] == labels
    (page,) = (json.loads(line) for line in said if line.startswith('{"page": '))
    assert page["command"] == "scripts/bench kernels --small --forms --without torch.compile"
    assert all(row["ms"] > 0 and row["eager"] > 0 for row in page["rows"])
    rows = json.loads((tmp_path / "bench_kernels.json").read_text(encoding="utf-8"))["rows"]
    assert {(row["op"], row["provider"]) for row in rows} == set(itertools.product(labels, ("ours", "eager")))
    assert len(list((tmp_path / "pages").glob("kernel_forms_small_*.md"))) == 1


def test_a_form_with_a_wrong_result_has_failed_and_no_time(kernel_forms, cpu, capsys):
    bench_forms = script_module("benchmarks.ops.kernel_forms")
    norm = kernel_forms.Form("rms_norm", "wrong", ("x", "weight"), {"offset": 1e-3}, kernel_forms.t5_norm)
    options = SimpleNamespace(small=True, without=["torch.compile"])
    found = bench_forms.measure([norm, dataclasses.replace(norm, options={})], cpu, options, math.inf)
    wrong, right = bench_forms.rows_of_table(found)
    assert wrong["goal"].startswith("failed: ") and "differs from float64 by" in wrong["goal"] and "ms" not in wrong
    assert right["goal"] in ("met", "missed") and right["ms"] > 0
    bench_forms.print_table([wrong, right], 3)
    assert capsys.readouterr().out.splitlines()[-1].endswith("1 failed, 1 not run")


def test_the_floor_of_a_form_counts_what_it_must_move(kernel_forms):
    (q_alone,) = (form for form in kernel_forms.FORMS if form.name.startswith("q alone"))
    (packed,) = (form for form in kernel_forms.FORMS if form.label == "swiglu: packed, up first")
    table, q = 2 * 16 * 128 * 2, 16 * 32 * 128 * 2  # cos and sin; bf16
    rope = kernel_forms.benchmark_of(q_alone).work(Case("", (16,), BF16))
    assert rope.traffic == (2 * q + table, 2 * q + table)
    mlp = kernel_forms.benchmark_of(packed).work(Case("", (8, 300), BF16))
    assert mlp.traffic == (3 * 8 * 300 * 2, 5 * 8 * 300 * 2)  # as of two tensors
