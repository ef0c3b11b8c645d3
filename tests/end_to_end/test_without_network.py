"""A hub id without a network: one sentence at once, and models and data sets in the cache work without a delay.

The hub is a port of this machine where nothing listens, or one that accepts connections and never answers.
"""

import json
import logging
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants
from support.command_line import RECIPE, overrides, run_here

from ligertune.errors import UserError
from ligertune.files import hub
from ligertune.planning.preflight import check_hub
from ligertune.recipe import load_recipe

LIMIT = 2.0  # seconds of a refusal, without the imports of the first test; the libraries alone take 23
SETTINGS = {"train.max_steps": 1, "checkpoint.output_dir": "run"}


@pytest.fixture
def closed_port(monkeypatch, tmp_path):
    """A hub that nothing answers for, an empty cache, and the records of the libraries' loggers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    _use_hub(monkeypatch, endpoint, tmp_path)
    return endpoint


def _use_hub(monkeypatch, endpoint, tmp_path):
    for name, value in {
        "ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(hub, "_lost", [])


@pytest.fixture
def cached(quickstart, tmp_path):
    """me/tiny in the cache of the hub."""
    snapshot = tmp_path / "cache" / "models--me--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(quickstart / "stories260K", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    return "me/tiny"


def _adapter(folder, base):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    return folder


@pytest.mark.parametrize(
    ("command", "settings", "key"),
    [
        ("train", {"model.model_name_or_path": "me/none"}, "model.model_name_or_path"),
        ("plan", {"model.model_name_or_path": "me/none"}, "model.model_name_or_path"),
        ("data", {"model.model_name_or_path": "me/none"}, "model.model_name_or_path"),
        ("data", {"model.tokenizer.path": "me/none"}, "model.tokenizer.path"),
        ("plan", {"data.datasets.0.path": "me/none"}, "data.datasets[0].path"),
        pytest.param("data", {"data.datasets.0.path": "me/none", "data.streaming": True, "data.val_split": 0},
                     "data.datasets[0].path", marks=pytest.mark.slow),
        ("distill", {"task": "distill", "distill.teacher": "me/none"}, "distill.teacher"),
        ("generate", None, "MODEL"),
        pytest.param("chat", None, "MODEL", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_hub_id_is_refused_at_once(command, settings, key, closed_port, tmp_path, caplog):
    given = ["me/none", *(["Hi."] if command == "generate" else [])]
    if settings is not None:
        given = [RECIPE, *overrides({**SETTINGS, **settings})]
    begun = time.perf_counter()
    done = run_here(command, *given, cwd=tmp_path)
    assert done.code == 2
    assert time.perf_counter() - begun < LIMIT
    assert done.err.startswith(f"Error: {key}: me/none is ")
    assert f"the hub could not be reached ({closed_port}: " in " ".join(done.err.split())
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["export", "generate"])
def test_the_base_model_of_an_adapter_is_named(command, closed_port, tmp_path):
    folder = _adapter(tmp_path / "adapter", "me/none")
    done = run_here(command, folder, *(["Hi."] if command == "generate" else []), cwd=tmp_path)
    assert done.code == 2 and f"base model of {folder}: me/none is not a folder here" in " ".join(done.err.split())


def test_a_cached_model_is_read_at_once_with_a_note(closed_port, cached, tmp_path, caplog):
    begun = time.perf_counter()
    done = run_here("plan", RECIPE, *overrides({**SETTINGS, "model.model_name_or_path": cached}), cwd=tmp_path)
    assert done.code == 0, done.err
    assert time.perf_counter() - begun < 5 * LIMIT
    said = " ".join(done.out.split())
    assert f"note: the hub could not be reached ({closed_port}: " in said and "come from the cache" in said
    assert not caplog.records
    other = run_here("plan", RECIPE, *overrides({"model.model_name_or_path": cached, "model.revision": "v2"}),
                     cwd=tmp_path)  # fmt: skip
    assert other.code == 2 and "does not hold its revision v2" in " ".join(other.err.split())


def test_offline_mode_that_the_user_asked_for_needs_no_note(closed_port, cached, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.check_hub_model(cached, key="MODEL")
    assert hub.hub_notes() == ()
    with pytest.raises(UserError, match=r"could not be reached \(HF_HUB_OFFLINE is set\)"):
        hub.check_hub_model("me/none", key="MODEL")


def test_a_data_set_in_the_cache_is_not_refused(closed_port, tmp_path):
    (tmp_path / "datasets" / "Open-Orca___open_orca").mkdir(parents=True)
    check_hub(load_recipe(RECIPE, overrides=["data.datasets.0.path=Open-Orca/OpenOrca"]))
    with pytest.raises(UserError, match="A streamed data set needs the hub"):
        hub.check_hub_dataset("Open-Orca/OpenOrca", key="data.datasets[0].path", streaming=True)


def test_a_hub_that_never_answers_is_given_up(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _use_hub(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.3)
        begun = time.perf_counter()
        assert "gave no answer in" in hub.why_unreachable()
        assert time.perf_counter() - begun < LIMIT
        assert constants.HF_HUB_OFFLINE  # the libraries do not ask again


@pytest.mark.parametrize(("status", "reachable"), [(200, True), (404, True), (405, True), (503, False)])
def test_a_hub_that_is_down_counts_as_out_of_reach(status, reachable, monkeypatch, tmp_path):
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words):
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _use_hub(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}", tmp_path)
        reason = hub.why_unreachable()
        server.shutdown()
    assert (reason == "") == reachable == (not constants.HF_HUB_OFFLINE)
    assert reachable or "answers with status 503" in reason
