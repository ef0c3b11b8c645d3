"""A folder with random weights of Llama-3-8B's sizes, for scripts that need a model as large as users'."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 128256, "num_hidden_layers": 32, "rope_theta": 500_000.0,
         "max_position_embeddings": 131072}  # fmt: skip
SMALL = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "vocab_size": 1024, "num_hidden_layers": 2}  # fmt: skip


def large_model(folder: Path, *, small: bool = False, layers: int | None = None) -> Path:
    """`folder`, made if it is not there: bfloat16 weights of all layers (or `layers`), and the quickstart's tokenizer.

    With `small` a model of two layers for a machine without a GPU.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if (folder / "config.json").is_file():
        return folder
    sizes = dict(SMALL if small else SIZES)
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # or this process would keep it from those that train
    for path in (ROOT / "configs" / "quickstart" / "stories260K").glob("*token*"):
        shutil.copy(path, folder)
    return folder
