"""The Hugging Face hub: models in its cache, models with their own code, and data sets that a test's server serves.

huggingface_hub and datasets read their variables when they are imported. For commands in this process the tests change
what they have read, and set the variables for new processes.
"""

import json
import shutil
import sys
from collections.abc import Iterator

import pytest
from support.command_line import RECIPE, Done, overrides, run
from support.data.hub_server import Hub, serving
from support.quickstart_runs import ONE_ROW

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def cached(quickstart, tmp_path, monkeypatch):
    """A hub cache with tiny/llama at the revisions `main` (five layers) and `short` (two)."""
    repository = tmp_path / "hub" / "models--tiny--llama"
    for revision, layers in (("main", 5), ("short", 2)):
        snapshot = repository / "snapshots" / (revision[0] * 40)
        shutil.copytree(quickstart / "stories260K", snapshot)
        config = json.loads((snapshot / "config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(revision[0] * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "tiny/llama"


def test_model_revision_selects_the_snapshot(cached, recipe, tmp_path, ligertune):
    settings = {"model.model_name_or_path": cached, "model.revision": "short", "model.init": "random",
                "train.max_steps": 1, "checkpoint.output_dir": "run", **ONE_ROW}  # fmt: skip
    done = ligertune("train", recipe, "--json", *overrides(settings))
    assert done.code == 0, done.err
    applied = {line["kernel"]: line["applied"] for line in json.loads(done.out)["kernels"]}
    assert applied["swiglu"] == 2


def test_the_code_of_a_model_runs_only_with_trust_remote_code(recipe, quickstart, tmp_path, ligertune):
    folder = tmp_path / "own"
    shutil.copytree(quickstart / "stories260K", folder)
    config = json.loads((folder / "config.json").read_text())
    mapped = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own_llama", "auto_map": mapped}))
    (folder / "modeling_own.py").write_text(CODE)
    settings = {"model.model_name_or_path": folder, "train.max_steps": 1, "checkpoint.output_dir": "run", **ONE_ROW}
    refused = ligertune("train", recipe, *overrides(settings))
    assert refused.code == 2
    assert "trust_remote_code" in refused.err
    trusted = ligertune("train", recipe, *overrides({**settings, "model.trust_remote_code": "true"}))
    assert trusted.code == 0, trusted.err


RUN = {
    "data.datasets.0.split": "test",
    "data.datasets.0.columns": "{instruction: question}",
    "data.datasets.0.max_samples": "null",
    "data.val_split": 0,
    "train.max_steps": 2,
    **ONE_ROW,
}

READ_ALL = """
from ligertune.data.rows.sources import RecordStream
from ligertune.errors import UserError
from ligertune.planning.options import DatasetOptions
read = 0
try:
    for _ in RecordStream(DatasetOptions(path="some/invalid", split="test")):
        read += 1
except UserError as error:
    print(read, error.exit_code, error)
"""


@pytest.fixture
def rows(quickstart) -> list[bytes]:
    """The quickstart's records with `instruction` renamed to `question`."""
    records = [json.loads(line) for line in (quickstart / "dolly_short.jsonl").read_bytes().splitlines()]
    return [json.dumps({"question": r.pop("instruction"), **r}).encode() + b"\n" for r in records]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[Hub]:
    """A hub whose `name` and `files` a test sets."""
    with serving("", {}) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HF_HOME", str(home))
        for module, constants in (
            (
                "huggingface_hub.constants",
                {
                    "ENDPOINT": hub.endpoint,
                    "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
                    "HF_HUB_CACHE": str(home / "hub"),
                    "HF_HUB_OFFLINE": False,
                },
            ),
            (
                "datasets.config",
                {
                    "HF_ENDPOINT": hub.endpoint,
                    "HUB_DATASETS_URL": hub.endpoint + "/datasets/{repo_id}/resolve/{revision}/{path}",
                    "HF_DATASETS_CACHE": home / "datasets",
                    "HF_HUB_OFFLINE": False,
                },
            ),
        ):
            for name, value in constants.items():
                patch.setattr(f"{module}.{name}", value)
        yield hub


@pytest.fixture
def train(hub, ligertune, tmp_path):
    """train(name, files, **settings): the finished command and the bytes that the hub sent."""

    def call(name: str, files: dict[str, bytes], **settings) -> tuple[Done, int]:
        hub.name, hub.files, hub.bytes_sent = name, files, 0
        settings = {**RUN, "data.datasets.0.path": name, "checkpoint.output_dir": tmp_path / "run", **settings}
        return ligertune("train", RECIPE, "--json", *overrides(settings)), hub.bytes_sent

    return call


def test_a_part_of_a_revision_is_downloaded_once_and_trained_on(hub, train, rows):
    content = b"".join(rows)
    files = {"en/test.jsonl": content, "de/test.jsonl": content[:100]}
    done, sent = train("some/set", files, **{"data.datasets.0.data_dir": "en", "data.datasets.0.revision": "v2"})
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    assert sent == len(content)
    assert "v2" in hub.revisions


@pytest.mark.slow
def test_a_stream_downloads_less_than_half_of_a_large_data_set(train, rows):
    content = b"".join(rows) * (150_000_000 // sum(map(len, rows)))  # `datasets` requests 10 MB at a time
    done, sent = train("some/large", {"data/test.jsonl": content}, **{"data.streaming": "true"})
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 2
    assert 0 < sent < len(content) / 2


@pytest.mark.slow
def test_an_invalid_row_of_a_hub_data_set_is_named(hub, rows, tmp_path):
    """The invalid row lies behind the part that `datasets` reads first, so the run has begun by then."""
    valid = b"".join(rows) * (12_000_000 // sum(map(len, rows)))
    hub.name, hub.files = "some/invalid", {"data/test.jsonl": valid + b'{"question": \n'}
    done = run([sys.executable, "-c", READ_ALL], cwd=tmp_path)
    assert done.code == 0, done.err
    read, exit_code, said = done.out.split(" ", 2)
    assert 0 < int(read) <= valid.count(b"\n")
    assert exit_code == "1"
    assert said.startswith(f"some/invalid:test:{int(read) + 1}: the hub does not return this row: ")


def test_a_missing_split_is_refused_with_one_sentence(train, rows):
    done, _ = train("some/other", {"data/test.jsonl": b"".join(rows)}, **{"data.datasets.0.split": "train"})
    assert done.code == 2
    assert "some/other is neither a file or folder here nor a data set on the hub" in done.err
    assert "Traceback" not in done.err
