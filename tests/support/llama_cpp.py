"""Run a GGUF file in llama.cpp, by the package xllamacpp, and ask for tokens and log-probabilities."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np


class LlamaCpp:
    """A GGUF file in llama.cpp on the CPU, one thread, with keys and values in float32."""

    def __init__(self, file: Path, *, context: int = 512) -> None:
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.n_ctx = context
        options.n_parallel = 1
        options.warmup = False
        options.verbosity = 0
        options.cpuparams.n_threads = 1
        options.cpuparams_batch.n_threads = 1
        options.n_gpu_layers = 0
        options.fit_params = False
        options.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(options)

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. special: with BOS where the file says so, and control tokens in the text."""
        asked = {"content": text, "add_special": special, "parse_special": special}
        return self._post("/tokenize", asked)["tokens"]

    def greedy(self, prompt: str | list[int], tokens: int) -> list[int]:
        """Return the ids of a greedy continuation."""
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        return self._post("/completion", asked)["tokens"]

    def log_probabilities(self, ids: list[int], vocabulary: int) -> np.ndarray:
        """Return the log-probabilities (V,) of the token after `ids`."""
        letter = self.tokens("a")[-1]  # for a token that is no whole character, llama.cpp lists no probabilities
        asked = {
            "prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": vocabulary, "cache_prompt": False,
            "logit_bias": [[letter, 1000.0]],
        }  # fmt: skip
        rows = self._post("/completion", asked)["completion_probabilities"][0]["top_logprobs"]
        found = np.full(vocabulary, -np.inf)
        for row in rows:
            found[row["id"]] = row["logprob"]
        return found

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """Return the prompt that the file's chat template makes."""
        return self._post("/apply-template", {"messages": messages})["prompt"]

    def _post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._server.listening_address}{path}", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
