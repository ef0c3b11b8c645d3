"""transformers does not mistake our folder `kernels/` on `sys.path` for Hugging Face's package `kernels`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_transformers_imports_from_the_repository_root():
    code = (
        "import sys; assert '' in sys.path, 'run with -c, the current folder is searched first'\n"
        "import importlib.metadata as metadata\n"
        "from transformers import AutoModelForCausalLM, LlamaConfig\n"
        "from transformers.utils import is_kernels_available\n"
        "installed = any(d.metadata['Name'] == 'kernels' for d in metadata.distributions())\n"
        "assert installed or not is_kernels_available()\n"
        "size = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1)\n"
        "config = LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=2)\n"
        "print(AutoModelForCausalLM.from_config(config).num_parameters())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(2 * 32 * 16 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16)
