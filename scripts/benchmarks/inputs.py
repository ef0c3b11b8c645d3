"""Inputs of the benchmarks: models, recipes and real texts of the test corpus, or the quickstart's with --small."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.tables.moe_models import MODELS as MIXTURES
from benchmarks.tables.moe_models import write_config

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"
TOKENIZER = QUICKSTART / "stories260K"
CORPUS = Path(os.environ.get("LIGERTUNE_TEST_DATA", ROOT.parent / "shared" / "data"))
# English has 4 to 5 characters a token, so records of 8 a token are truncated and fill their rows.
CHARACTERS = 8
# A longer prompt may leave no room for an answer in 2,048 tokens.
LONGEST_PROMPT = 2000
IMAGES = ("cc12m_32/llava_pretrain_style.json", "mllm_demo/mllm_demo.json", "qwen_vl_demo/single_images.json")


def add_inputs(parser: argparse.ArgumentParser, *, small: str = "the quickstart's model, for a machine without a GPU"):
    """Add --corpus, --out and --small."""
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of the test data (LIGERTUNE_TEST_DATA)")
    parser.add_argument("--out", type=Path, help="folder for data, recipes and logs")
    parser.add_argument("--small", action="store_true", help=small)


@dataclass(frozen=True)
class Inputs:
    """Where inputs come from, and where written ones go."""

    corpus: Path
    out: Path
    small: bool

    @property
    def tokenizer(self) -> Path:
        return TOKENIZER if self.small else self.corpus / "tokenizers" / "mistral-7b-v0.1"

    @property
    def alpaca(self) -> Path:
        return QUICKSTART / "dolly_short.jsonl" if self.small else self.corpus / "alpaca" / "alpaca_random_9k.json.gz"


# ---- recipes


def nested(dotted: Mapping[str, object]) -> dict:
    """Return {"a": {"b": 1}} for {"a.b": 1}. Paths become strings."""
    tree: dict = {}
    for key, value in dotted.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = str(value) if isinstance(value, Path) else value
    return tree


def write_recipe(path: Path, dotted: Mapping[str, object]) -> Path:
    """Write a recipe. JSON is YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(nested({"version": 1, **dotted})), encoding="utf-8")
    return path


def override_arguments(settings: Mapping[str, object]) -> list[str]:
    """Return the settings as --set options of `ligertune`."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


# ---- models


def model_settings(inputs: Inputs, name: str, *, layers: int | None, written: bool = False) -> dict[str, object]:
    """Return the recipe keys of a model with random weights; with --small of a small model of the same kind.

    written: the weights are in a folder, so that other tools load the same ones.
    """
    if written:
        dtype = "float32" if inputs.small else "bfloat16"
        return {"model.model_name_or_path": write_model(inputs, name, name), "model.dtype": dtype}
    if name in MIXTURES:
        settings = {"model.model_name_or_path": write_config(name, inputs.out / name, small=inputs.small)}
        # any tokenizer will do for random words, and this one needs no corpus
        settings |= {"model.dtype": "bfloat16", "model.tokenizer.path": TOKENIZER}
    elif name.startswith("Qwen2-VL"):
        config = inputs.corpus / "model_configs" / name
        settings = {"model.model_name_or_path": narrow_vision_model(inputs, config) if inputs.small else config}
        settings |= {"model.tokenizer.path": inputs.corpus / "tokenizers" / "qwen2.5"}
    elif inputs.small:
        return {"model.model_name_or_path": TOKENIZER, "model.dtype": "float32"}
    else:
        settings = {"model.model_name_or_path": inputs.corpus / "model_configs" / name, "model.dtype": "bfloat16"}
        settings |= {"model.tokenizer.path": inputs.tokenizer}
    if layers and not inputs.small:
        settings["model.num_hidden_layers"] = layers
    return {**settings, "model.init": "random"}


def narrow_vision_model(inputs: Inputs, config: Path) -> Path:
    """Write the published configuration with two narrow layers in each part."""
    folder = inputs.out / "small"
    shutil.copytree(config, folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
               "num_hidden_layers": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}  # fmt: skip
    values["vision_config"] |= {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


WRITE_MODEL = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
source, tokenizer, target = sys.argv[1:]
torch.manual_seed(1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)
"""


def write_model(inputs: Inputs, config: str, name: str = "teacher") -> Path:
    """Write a model with random weights, if it is missing. In its own process: this one must hold no GPU memory."""
    if inputs.small:
        return TOKENIZER
    folder = inputs.out / name
    written = folder / "written"  # the weights may be there in part
    if not written.exists():
        source = inputs.corpus / "model_configs" / config
        command = [sys.executable, "-c", WRITE_MODEL, str(source), str(inputs.tokenizer), str(folder)]
        subprocess.run(command, check=True)
        written.touch()
    return folder


# ---- data


def read_records(path: Path) -> list[dict]:
    """Read JSON or JSON lines, packed or not. Not by `splitlines`, which also cuts at separators inside texts."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = content.decode("utf-8")
    if text.lstrip()[:1] == "[":
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def full_rows(inputs: Inputs, length: int, rows: int) -> list[dict[str, object]]:
    """Write records of real text that are longer than `length` tokens, so that truncation leaves full rows."""
    path = inputs.out / f"text-{length}-{rows}.jsonl"
    size = CHARACTERS * length
    if not path.exists():  # tables and sides share it
        records = read_records(inputs.alpaca)
        text = "\n".join(str(record.get(key, "")) for record in records for key in ("instruction", "output"))
        text *= -(-rows * size // len(text))
        pieces = (text[i * size : (i + 1) * size] for i in range(rows))
        write_lines(path, [{"prompt": "Go on.", "completion": piece} for piece in pieces])
    return [{"path": str(path), "format": "prompt_completion"}]


def alpaca_records(inputs: Inputs, length: int, rows: int) -> list[dict[str, object]]:
    return [{"path": str(inputs.alpaca), "format": "alpaca"}]


def random_words(inputs: Inputs, length: int, rows: int) -> list[dict[str, object]]:
    """Write documents of random words, each with more tokens than `length`: routers see many different tokens."""
    chosen = random.Random(0)  # the same words in each run
    path = inputs.out / f"words-{length}-{rows}.jsonl"

    def word() -> str:
        return "".join(chosen.choices(string.ascii_lowercase, k=chosen.randint(2, 8)))

    write_lines(path, [{"text": " ".join(word() for _ in range(length))} for _ in range(rows)])
    return [{"path": str(path), "format": "text"}]


def real_pairs(inputs: Inputs) -> list[dict]:
    """Return prompts with two real answers: of Qwen3-235B, chosen, and of GPT-4."""
    if inputs.small:
        return read_records(QUICKSTART / "preferences.jsonl")
    answers = {}
    for row in read_records(inputs.corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl"):
        turns = [turn["value"] for turn in row["conversations"]]
        answers |= {prompt.strip(): answer for prompt, answer in pairwise(turns)}
    pairs = []
    for row in read_records(inputs.corpus / "messages" / "sharegpt_gpt4-qwen3_a22B_output.jsonl"):
        prompt, answer = (message["content"].strip() for message in row["messages"][:2])
        other = answers.get(prompt, "").strip()
        if answer and other and len(prompt) <= LONGEST_PROMPT:
            pairs.append({"prompt": f"{prompt}\n", "chosen": answer, "rejected": other})
    return pairs


def preference_pairs(inputs: Inputs, length: int, rows: int) -> list[dict[str, object]]:
    """Write as many pairs as a run reads; they repeat if there are fewer."""
    pairs = real_pairs(inputs)
    chosen = [pairs[i % len(pairs)] for i in range(rows)]
    return [{"path": str(write_lines(inputs.out / f"pairs-{rows}.jsonl", chosen))}]


def completions(inputs: Inputs, length: int, rows: int) -> list[dict[str, object]]:
    """Write the prompts of the pairs with their chosen answers."""
    pairs = real_pairs(inputs)
    chosen = [pairs[i % len(pairs)] for i in range(rows)]
    lines = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in chosen]
    return [{"path": str(write_lines(inputs.out / f"sequences-{rows}.jsonl", lines))}]


def labelled_texts(inputs: Inputs, length: int, rows: int) -> list[dict[str, object]]:
    """Write turns of conversations, labelled by who wrote them."""
    if inputs.small:
        records = read_records(QUICKSTART / "dolly_short.jsonl")
        texts = [{"text": row[key], "label": key} for row in records for key in ("instruction", "output")]
    else:
        conversations = read_records(inputs.corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl")
        turns = (turn for row in conversations for turn in row["conversations"])
        texts = [{"text": turn["value"], "label": turn["from"]} for turn in turns if turn["from"] in ("human", "gpt")]
    chosen = [texts[i % len(texts)] for i in range(rows)]
    return [{"path": str(write_lines(inputs.out / f"texts-{rows}.jsonl", chosen))}]


def real_images(inputs: Inputs, length: int, rows: int) -> list[dict[str, object]]:
    return [{"path": str(inputs.corpus / "images" / path), "weight": 4.0} for path in IMAGES]


# kind -> what returns `data.datasets`, given tokens of a row and the rows that a run reads
DATA: dict[str, Callable[[Inputs, int, int], list[dict[str, object]]]] = {
    "full rows": full_rows,
    "alpaca": alpaca_records,
    "random words": random_words,
    "pairs": preference_pairs,
    "completions": completions,
    "texts": labelled_texts,
    "images": real_images,
}
