"""Thirty recipes of other tools (peer_recipes.yaml) import without an edit, and `plan` accepts what they become."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.command_line import ROOT, run_here

from ligertune.errors import UserError
from ligertune.recipe import load_recipe
from ligertune.recipe.importers.import_recipe import import_recipe
from ligertune.recipe.importers.import_tables import TRAINING

RECIPES = yaml.safe_load(Path(__file__).with_name("peer_recipes.yaml").read_text("utf-8"))
KEPT = [case for case in RECIPES if "refused" not in case]
REFUSED = [case for case in RECIPES if "refused" in case]
HUB_MODEL = "meta-llama/Llama-3.2-1B-Instruct"
QUICKSTART = ROOT / "configs" / "quickstart"
ASK = {"role": "user", "content": "Who painted it?"}
SAY = {"role": "assistant", "content": "A friend of mine, last year."}
NO = {"role": "assistant", "content": "No."}
# the data sets of the recipes, by their hub ids or file names
ROWS = {
    "hub/chats": {"messages": [ASK, SAY, ASK, NO]},
    "chats_sharegpt": {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A friend."}]},
    "hub/alpaca": {"instruction": "Name a colour.", "input": "", "output": "Blue, or green."},
    "hub/pairs": {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]},
    "hub/labelled": {"prompt": [ASK], "completion": [SAY], "label": True},
    "hub/texts": {"text": "Once upon a time there was a friend who painted."},
    "hub/questions": {"question": "Who painted it?", "answer": "A friend."},
    "hub/completions": {"prompt": "Who painted it?", "completion": " A friend."},
}
WITHOUT = {
    "wandb": "logging.report_to=[jsonl]",
    "tensorboard": "logging.report_to=[jsonl]",
    "swanlab": "logging.report_to=[jsonl]",
    "deepspeed": "parallel.strategy=fsdp",
}
# tokens of the hub's model that the recipes name
TOKENS = ["<|finetune_right_pad_id|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]


def names(cases: list[dict]) -> list[str]:
    return [case["name"] for case in cases]


@pytest.fixture
def imported(tmp_path, monkeypatch) -> Callable:
    """imported(text): the import of a file with this text, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def imported(text: str):
        Path("tool.yml").write_text(text)
        return import_recipe(Path("tool.yml"))

    return imported


def test_the_recipes_are_of_every_tool():
    tools = [case["name"].partition(",")[0] for case in RECIPES]
    counts = {tool: tools.count(tool) for tool in dict.fromkeys(tools)}
    assert counts == {"axolotl": 10, "llama-factory": 8, "trl": 6, "torchtune": 3, "unsloth": 3}
    assert len(KEPT) >= 27


@pytest.mark.parametrize("case", KEPT, ids=names(KEPT))
def test_a_recipe_of_another_tool_imports_without_an_edit(case, imported):
    found = imported(case["text"])
    Path("ours.yaml").write_text(found.text)
    assert load_recipe(Path("ours.yaml")).notices == ()
    assert [item.key for item in found.left if item.harm == TRAINING] == case.get("loud", [])


@pytest.mark.parametrize("case", REFUSED, ids=names(REFUSED))
def test_a_recipe_that_cannot_be_kept_is_refused_with_the_reasons(case, imported):
    with pytest.raises(UserError, match=case["refused"]):
        imported(case["text"])


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> dict[str, str]:
    """Local files in place of what the recipes name on the hub: a tiny model with its tokens, and data sets."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("hub")
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "stories260K")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig.from_pretrained(QUICKSTART / "stories260K")
    config.vocab_size = len(tokenizer)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    found = {HUB_MODEL: str(folder / "model")}
    for name, row in ROWS.items():
        file = folder / f"{name.rpartition('/')[2]}.jsonl"
        # KTO needs desirable and undesirable answers
        rows = [row | ({"label": number % 2 == 0} if "label" in row else {}) for number in range(2000)]
        file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
        found[name if "/" in name else file.name] = str(file)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", KEPT, ids=names(KEPT))
def test_plan_accepts_an_imported_recipe(case, hub, imported, tmp_path):
    text = case["text"]
    for name, file in hub.items():
        text = text.replace(name, file)
    Path("ours.yaml").write_text(imported(text).text)
    done = run_here("plan", "ours.yaml", "--memory", "80", cwd=tmp_path)
    package = re.search(r"needs the package (\w+), which is not installed", done.err)
    if package:  # the sentence says what to install; without it
        done = run_here("plan", "ours.yaml", "--memory", "80", "--set", WITHOUT[package[1]], cwd=tmp_path)
    assert done.code == 0, done.err
