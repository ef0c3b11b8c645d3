"""The model that answers in this process: that of the recipe, or a run, model or adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ligertune.any_types import AnyModule
from ligertune.decode.sampling import Answer, Prompt, SamplingSettings, check_prompt_ids, sample_answers
from ligertune.errors import UserError
from ligertune.features.sample.recipe import SampleSpec
from ligertune.features.sample.sample_prompts import SamplePrompts
from ligertune.files.model_files import digest_of
from ligertune.hardware import local_rank, this_machine
from ligertune.models.load import build_model, hide_loading_bars
from ligertune.models.load_tokenizer import load_tokenizer, read_tokenizer
from ligertune.models.read_config import config_value, read_config
from ligertune.models.save import SAVED_MODEL, load_saved, read_saved_config, saved_spec
from ligertune.models.score_head import gives_scores
from ligertune.models.shape import base_of
from ligertune.patching.patch import patch
from ligertune.planning.options import BuildOptions
from ligertune.planning.precision import choose_precision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_HASHED = (".safetensors", ".bin", ".json", ".jinja")  # files of a model that decide on its answers


@dataclass(frozen=True)
class LocalSource:
    """A model to load. saved: folder or hub id of sample.source, once it was found; None: the recipe's model."""

    options: BuildOptions
    saved: str | None

    @property
    def name(self) -> str:
        """The folder or hub id, for messages."""
        return self.saved or self.options.model.model_name_or_path

    def about(self) -> dict[str, Any]:
        """Return what identifies the model: its name, and a hash of the files of a folder."""
        folder = Path(self.name).expanduser()
        dtype = None if self.saved else self.options.model.dtype
        if not folder.is_dir():
            revision = "main" if self.saved else self.options.model.revision
            return {"source": self.name, "source_version": revision, "dtype": dtype}
        files = sorted(path for path in folder.iterdir() if path.suffix in _HASHED)
        digests = "".join(f"{path.name} {digest_of(path)}\n" for path in files)
        version = hashlib.sha256(digests.encode()).hexdigest()[:32]
        return {"source": self.name, "source_version": version, "dtype": dtype}

    def config(self) -> PreTrainedConfig:
        """Return the model's configuration. Raises UserError for one that writes no text."""
        model = self.options.model
        if self.saved is None and model.init != "pretrained":
            raise UserError(
                f"model.init: {model.init}: a model with random weights has no answers.",
                hint="Train it, and name the run in sample.source.",
            )
        config = read_config(model) if self.saved is None else read_saved_config(self.saved, self._spec())
        if gives_scores(config):
            raise UserError(
                f"sample.source: {self.name} scores texts and writes none.",
                hint="Name a language model, and this one in sample.score_model.",
            )
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, before its weights are loaded."""
        if self.saved is None:
            return load_tokenizer(self.options.model).tokenizer
        return read_tokenizer(self._spec(), SAVED_MODEL)

    def load(self) -> AnyModule:
        """Return the model on this process's device, with our kernels, ready to generate."""
        hide_loading_bars()
        machine = this_machine()
        if machine.device == "cuda":
            # modulo: more processes than GPUs share them
            torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        model: AnyModule
        spec = self.options.model
        if self.saved is None:
            dtype = getattr(torch, choose_precision(spec.dtype, machine).weights)
            model = build_model(spec, self.config(), dtype=dtype, device=machine.device, seed=0)
        else:
            trusted = spec.trust_remote_code
            model, _ = load_saved(self.saved, trust_remote_code=trusted, keep_wrapper=True)
        if machine.device == "cpu" and base_of(model).dtype == torch.float16:
            model = model.float()  # exact, and a CPU computes few functions in float16
        kernels = self.options.kernels
        if kernels.enabled is not False:
            patch(model, rope=kernels.rope, norm=kernels.norm, mlp=kernels.mlp, mixer=kernels.mixer)
        return model.eval()

    def _spec(self) -> Any:
        assert self.saved is not None
        return saved_spec(self.saved, trust_remote_code=self.options.model.trust_remote_code)


def seed_of(seed: int, place: int) -> int:
    """Return the seed of a prompt: it depends on the recipe's seed and the prompt's place alone. 48 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{place}".encode()).digest()[:6], "big")


def answers_of(
    source: LocalSource,
    model: AnyModule,
    tokenizer: PreTrainedTokenizerBase,
    found: SamplePrompts,
    places: Sequence[int],
    *,
    spec: SampleSpec,
) -> Iterator[Answer]:
    """Yield answers to the prompts at these places as they finish; `Answer.prompt` counts these. model: loaded.

    Warns with a SamplingNote.
    """
    settings = SamplingSettings(
        max_new_tokens=spec.max_new_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        stop=spec.stop,
        end_tokens=tuple(sorted(found.end_tokens)),
    )
    asked = [Prompt(found.prompts[place].ids, seed_of(spec.seed, place)) for place in places]
    check_prompt_ids(model, max(max(prompt.ids) for prompt in asked), name=source.name)
    try:
        yield from sample_answers(
            model,
            tokenizer,
            asked,
            settings,
            answers_each=spec.num_generations,
            name=source.name,
            batch_size=spec.generation_batch_size,
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            "Sampling ran out of device memory. Finished answers are kept.",
            hint="Write a smaller sample.generation_batch_size, and run the command again to continue.",
            exit_code=1,
        ) from error


def check_answers_fit(config: PreTrainedConfig, found: SamplePrompts, spec: SampleSpec) -> None:
    """Raise UserError if a prompt and its answer may be longer than the context of the model."""
    context = config_value(config.get_text_config(), "max_position_embeddings")
    longest = max((len(prompt.ids) for prompt in found.prompts), default=0)
    if context and longest + spec.max_new_tokens > context:
        raise UserError(
            f"sample.max_new_tokens: {spec.max_new_tokens} and a prompt of {longest} tokens exceed the context "
            f"of the model, {context} tokens.",
            hint="Write a smaller one, or drop long prompts with data.max_length.",
        )
