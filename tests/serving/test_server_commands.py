"""The commands of servers: options by what the files are, printed by `export` and written on the model card."""

import json
import shutil

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from support.command_line import run_here
from transformers import AutoModelForCausalLM

from ligertune.files.base_model import TrainedBase
from ligertune.serving.server_commands import (
    AdapterFacts,
    GgufNames,
    ServedFiles,
    adapter_facts,
    server_commands,
    serving_note,
)


def test_a_model_is_served_by_three_servers():
    found = dict(server_commands(ServedFiles("runs/my model", "mine")))
    assert found == {
        "vLLM": "vllm serve 'runs/my model' --served-model-name mine",
        "SGLang": "python -m sglang.launch_server --model-path 'runs/my model' --served-model-name mine",
        "llama.cpp": "python convert_hf_to_gguf.py 'runs/my model' --outtype bf16 --outfile mine.gguf"
        " && llama-server -m mine.gguf",
    }
    assert [server for server, _ in server_commands(ServedFiles("a", "b", reads_images=True))] == ["vLLM", "SGLang"]


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (4, 8), (16, 16), (17, 32), (300, 320), (1000, 1000)])
def test_vllm_gets_the_next_rank_that_it_knows(rank, most):
    files = ServedFiles("out/adapter", "mine", adapter=AdapterFacts(rank, "bfloat16", ""), base="org/base")
    found = dict(server_commands(files))
    assert found["vLLM"] == (
        f"vllm serve org/base --dtype bfloat16 --enable-lora --max-lora-rank {most} --lora-modules mine=out/adapter"
    )
    assert found["SGLang"].endswith("--model-path org/base --dtype bfloat16 --lora-paths mine=out/adapter")


def test_a_gguf_file_is_served_by_llama_cpp_and_ollama():
    gguf = GgufNames("out/X-f16.gguf", "out/Modelfile")
    found = server_commands(ServedFiles("out", "X", has_weights=False, gguf=gguf))
    assert found == [
        ("llama.cpp", "llama-server -m out/X-f16.gguf --alias X"),
        ("Ollama", "ollama create x -f out/Modelfile && ollama run x"),
    ]
    with_model = [server for server, _ in server_commands(ServedFiles("out", "X", gguf=gguf))]
    assert with_model == ["vLLM", "SGLang", "llama.cpp", "Ollama"]


PLAIN = {"r": 4, "rank_pattern": {"a": 32}}


@pytest.mark.parametrize(
    ("config", "base", "reason"),
    [
        (PLAIN, TrainedBase("b", "bfloat16"), ""),
        ({**PLAIN, "use_dora": True}, None, "DoRA"),
        ({**PLAIN, "modules_to_save": ["lm_head"]}, None, "whole layers"),
        ({**PLAIN, "target_parameters": ["experts.down_proj"]}, None, "experts"),
        (PLAIN, TrainedBase("b", "bfloat16", stored_as="nf4"), "quantised weights"),
    ],
)
def test_an_adapter_that_servers_do_not_compute_is_to_be_merged(config, base, reason, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    facts = adapter_facts(tmp_path, base)
    assert facts.rank == 32 and facts.dtype == ("auto" if base is None else "bfloat16")
    assert (reason in facts.merge_first) and bool(facts.merge_first) == bool(reason)
    files = ServedFiles("a", "b", adapter=facts, base="c")
    assert bool(server_commands(files)) == (not reason)
    assert serving_note(files, "chat").startswith("Merge the adapter" if reason else "")


def test_requests_have_the_prompt_of_training():
    files = ServedFiles("a", "b")
    assert serving_note(files, "chat") == ""
    assert "Send the prompt of training as a completion" in serving_note(files, "alpaca")
    assert "Send the text as a completion" in serving_note(files, "raw")


@pytest.fixture(scope="module")
def adapter(quickstart, tmp_path_factory):
    """An adapter of PEFT without a card."""
    folder = tmp_path_factory.mktemp("commands") / "adapter"
    base = quickstart / "stories260K"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    return folder


def test_export_prints_the_commands_and_the_card_has_them(adapter, quickstart, tmp_path):
    done = run_here("export", adapter, "--out", "copy", "--adapter", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    options = "--dtype auto --enable-lora --max-lora-rank 8 --lora-modules copy=copy"
    lora = f"vllm serve {quickstart / 'stories260K'} {options}"
    assert json.loads(done.out)["commands"]["vLLM"] == lora and f"vLLM: {lora}" in done.err
    card = (tmp_path / "copy" / "README.md").read_text(encoding="utf-8")
    assert f"vllm serve stories260K {options}  # vLLM" in card


def test_the_card_of_a_merged_model_has_the_commands_of_its_gguf_file(adapter, tmp_path):
    pytest.importorskip("gguf")
    merged = run_here("export", adapter, "--out", "merged", "--gguf", "bf16", "--json", cwd=tmp_path)
    assert merged.code == 0, merged.err
    assert list(json.loads(merged.out)["commands"]) == ["vLLM", "SGLang", "llama.cpp", "Ollama"]
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert "llama-server -m adapter-bf16.gguf --alias merged  # llama.cpp" in card
    assert "ollama create merged -f Modelfile && ollama run merged  # Ollama" in card and "from_pretrained" in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"


def test_a_card_of_a_gguf_file_alone_loads_nothing(quickstart, tmp_path):
    pytest.importorskip("gguf")
    done = run_here("export", quickstart / "stories260K", "--out", "out", "--gguf", "f16", cwd=tmp_path)
    assert done.code == 0 and f"vLLM: vllm serve {quickstart / 'stories260K'} " in done.out
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "from_pretrained" not in card and "vllm" not in card and "llama-server -m stories260K-f16.gguf" in card


def test_an_adapter_with_dora_is_to_be_merged_says_export(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    done = run_here("export", "adapter", "--out", "copy", "--adapter", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["commands"] == {} and "Merge the adapter before you serve it" in done.err
    card = (tmp_path / "copy" / "README.md").read_text(encoding="utf-8")
    assert "Merge the adapter before you serve it: servers do not load DoRA." in card and "vllm" not in card
