"""Runs that log to trackio, SwanLab and Comet, offline: what each has stored is what metrics.jsonl holds."""

import json
import sqlite3
import struct
import zipfile

import pytest
from support.command_line import metrics, run, train_command

SETTINGS = {
    "model.init": "random", "model.num_hidden_layers": 2, "data.datasets.0.max_samples": 20, "data.val_split": 0,
    "train.max_steps": 2, "train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 1,
    "logging.logging_steps": 1, "logging.run_name": "first", "checkpoint.save_strategy": "no",
}  # fmt: skip


def logged(folder, monkeypatch, tracker: str, **variables: object) -> list[dict]:
    """Train with a tracker, and return the lines of the steps."""
    for name, value in {"HOME": folder, **variables}.items():
        monkeypatch.setenv(name, str(value))
    settings = {**SETTINGS, "logging.report_to": tracker, "checkpoint.output_dir": "run"}
    done = run(train_command(**settings), cwd=folder)
    assert done.code == 0, done.err
    return [line for line in metrics(folder / "run") if "loss" in line]


@pytest.mark.slow
def test_trackio_stores_the_losses_of_a_run(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    lines = logged(tmp_path, monkeypatch, "trackio", TRACKIO_DIR=tmp_path / "stored")
    rows = sqlite3.connect(tmp_path / "stored" / "first.db").execute("select run_name, step, metrics from metrics")
    stored = [(name, step, json.loads(values)["loss"]) for name, step, values in rows]
    assert stored == [("first", line["step"], line["loss"]) for line in lines] and len(stored) == 2


@pytest.mark.slow
def test_swanlab_stores_the_losses_of_a_run(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    lines = logged(tmp_path, monkeypatch, "swanlab", SWANLAB_MODE="offline", SWANLAB_LOG_DIR=tmp_path / "stored")
    (file,) = (tmp_path / "stored").rglob("*.swanlab")
    stored = file.read_bytes()
    assert b"first" in stored and len(lines) == 2
    # records of protobuf hold a number as 8 bytes
    assert all(struct.pack("<d", line["loss"]) in stored for line in lines)


@pytest.mark.slow
def test_comet_stores_the_losses_of_a_run(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml")
    folder = tmp_path / "stored"
    lines = logged(tmp_path, monkeypatch, "comet_ml", COMET_START_ONLINE="0", COMET_OFFLINE_DIRECTORY=folder)
    (file,) = folder.glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        messages = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
    metrics_of_run = [message["metric"] for message in messages if "metric" in message]
    stored = [(one["step"], one["metricValue"]) for one in metrics_of_run if one["metricName"] == "loss"]
    assert stored == [(line["step"], line["loss"]) for line in lines] and len(stored) == 2
    assert {"key": "Name", "value": "first"}.items() <= next(
        one for one in messages if one.get("key") == "Name"
    ).items()
