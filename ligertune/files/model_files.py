"""Check the files of a model folder before transformers opens them, and turn its errors into one sentence.

A folder may come from anyone. Checked here: JSON files, the sizes of a configuration, and weight files, which an index
must not look for outside its folder. `loading` is around each call of transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open

from ligertune.errors import UserError, format_count
from ligertune.files.checked_files import DamagedFileError, read_json_value

if TYPE_CHECKING:
    from torch import nn

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
SAFE_WEIGHTS = "model.safetensors"
SAFE_INDEX = "model.safetensors.index.json"
# In the order in which transformers looks for them.
WEIGHT_FILES = (SAFE_WEIGHTS, SAFE_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
ENDINGS = (".safetensors", ".bin")
MAX_MODEL_JSON_BYTES = 256 * 2**20  # the largest published tokenizer.json have some 30 MB
SHOWN_CHARACTERS = 300  # of a library's message
# A weight file's digest is that of samples: for a checkpoint of 16 GB it takes a second.
SAMPLES = 256
SAMPLE_BYTES = 1 << 14


@dataclass(frozen=True)
class ModelOrigin:
    """What the user wrote to name a model: a recipe key or an argument. Error messages begin with it."""

    key: str
    trust: str  # how the user allows the model's own code

    def error(self, message: str, hint: str = "") -> UserError:
        return UserError(f"{self.key}: {message}", hint=hint)

    def own_code(self, file: object) -> UserError:
        """Return the error of a model that transformers can load only with the Python code of its repository."""
        return self.error(
            f"{file} needs the model's own Python code (auto_map), which is not run.",
            hint=f"If you have read that code and trust it, {self.trust}.",
        )


RECIPE_MODEL = ModelOrigin("model.model_name_or_path", "write model.trust_remote_code: true")
RECIPE_TOKENIZER = ModelOrigin("model.tokenizer.path", "write model.trust_remote_code: true")


@contextlib.contextmanager
def loading(origin: ModelOrigin, what: str, hint: str = "") -> Iterator[None]:
    """Turn any error of a library into a UserError: "{key}: {what}: {the library's first lines}"."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # a panic of the tokenizers' Rust code is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "pass the argument `trust_remote_code=True`" in str(error):
            raise origin.own_code(what.removesuffix(" cannot be used")) from error
        raise origin.error(f"{what}: {reason_of(error).rstrip('.')}.", hint) from error


def reason_of(error: BaseException) -> str:
    """Return the first two lines of an error's message, or what its type says if it has none."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(" ".join(lines[:2]), SHOWN_CHARACTERS, placeholder=" ...") if lines else type(error).__name__


def read_json(path: Path, origin: ModelOrigin) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError, also for a file that holds another kind of value."""
    try:
        found = read_json_value(path, most=MAX_MODEL_JSON_BYTES)
    except DamagedFileError as error:
        raise origin.error(f"{path} {error}.") from error
    except OSError as error:
        raise origin.error(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(found, dict):
        raise origin.error(f"{path} holds {_json_kind(found)}, and must hold an object {{...}}.")
    return found


def _json_kind(value: object) -> str:
    kinds = ((list, "a list"), (str, "a string"), (type(None), "null"), (bool, str(value).lower()))
    return next((words for kind, words in kinds if isinstance(value, kind)), f"the number {value}")


# ---- sizes of a configuration

# (keys, smallest, largest accepted value). The largest published models stay far below these.
_SIZES = (
    (("vocab_size",), 1, 2**24),
    (("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1, 2**12),
    (("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), 1, 2**14),
    (("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), 1, 2**14),
    (("hidden_size", "n_embd", "d_model", "linear_key_head_dim", "linear_value_head_dim"), 1, 2**18),
    (("head_dim",), 0, 2**18),  # 0: GLM-5 computes it from other keys
    (("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), 1, 2**22),
    (("max_position_embeddings", "n_positions"), 1, 2**30),
    (("num_labels",), 0, 2**20),  # transformers writes a name for each
    (("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 0, 2**14),
)
_LIMITS = {key: (smallest, largest) for keys, smallest, largest in _SIZES for key in keys}
_SHARED_HEADS = (  # heads, what several of them share, in words
    ("num_attention_heads", "num_key_value_heads", "key and value heads"),
    ("linear_num_value_heads", "linear_num_key_heads", "key heads"),
)
_DROPOUTS = ("dropout", "_pdrop", "dropout_prob", "layerdrop")  # endings of probabilities
MAX_PARAMETERS = 10**13  # the largest published models have 10**12
MAX_DEPTH = 8  # configurations within configurations


def check_sizes(values: dict[str, Any], file: object, origin: ModelOrigin, prefix: str = "") -> None:
    """Raise UserError for sizes in a config.json that no model has, before anything is allocated.

    prefix: the keys that lead to `values`, such as "text_config.".
    """
    for key, value in values.items():
        if key in _LIMITS:
            _check_size(f"{prefix}{key}", value, *_LIMITS[key], file, origin)
        elif key.endswith(_DROPOUTS):
            _check_share(f"{prefix}{key}", value, file, origin)
        elif isinstance(value, dict) and key.endswith("config"):
            if prefix.count(".") >= MAX_DEPTH:
                raise origin.error(f"{file}: {prefix}{key} is nested too deeply.")
            check_sizes(value, file, origin, f"{prefix}{key}.")
    _check_heads(values, file, origin, prefix)
    _check_chosen(values, file, origin, prefix)
    parameters = _parameters(values)
    if parameters > MAX_PARAMETERS:
        raise origin.error(
            f"{file}: {prefix}hidden_size, {prefix}num_hidden_layers and {prefix}vocab_size make a model of"
            f" {parameters:.0e} parameters.",
            hint="Is the file damaged?",
        )


def _check_share(name: str, value: Any, file: object, origin: ModelOrigin) -> None:
    if isinstance(value, bool | None) or (type(value) in (int, float) and 0 <= value <= 1):
        return
    raise origin.error(f"{file}: {name} is {json.dumps(value)[:40]}, and must be a number from 0 to 1.")


def _check_size(name: str, value: Any, smallest: int, largest: int, file: object, origin: ModelOrigin) -> None:
    for number in value if isinstance(value, list) else [value]:  # a list has one value per layer
        if number is None or (type(number) is int and smallest <= number <= largest):
            continue
        shown = json.dumps(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}"
        raise origin.error(
            f"{file}: {name} is {shown[:40]}, and must be a whole number from {smallest} to {largest:,}."
        )


def check_token_ids(values: dict[str, Any], file: object, origin: ModelOrigin) -> None:
    """Raise UserError for ids of special tokens that cannot be ids. Some files have -1 for none."""
    for name, value in values.items():
        if name.endswith("_token_id"):
            _check_size(name, value, -1, _LIMITS["vocab_size"][1], file, origin)


def _check_heads(values: dict[str, Any], file: object, origin: ModelOrigin, prefix: str) -> None:
    """Raise UserError if heads cannot share keys and values. The width need not be a multiple of them in all models."""
    for key, of_shared, what in _SHARED_HEADS:
        heads = values.get(key)
        shared = values.get(of_shared)
        if type(heads) is int and type(shared) is int and heads % shared:
            raise origin.error(
                f"{file}: {prefix}{key} is {heads}, and must be a multiple of the number of {what}, "
                f"{prefix}{of_shared}: {shared}."
            )


def _check_chosen(values: dict[str, Any], file: object, origin: ModelOrigin, prefix: str) -> None:
    """Raise UserError unless num_experts_per_tok is from 1 to the number of experts. Models without experts pass."""
    numbers = [values.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    number = max((n for n in numbers if type(n) is int), default=0)
    chosen = values.get("num_experts_per_tok")
    if number and type(chosen) is int and not 1 <= chosen <= number:
        raise origin.error(
            f"{file}: {prefix}num_experts_per_tok is {chosen}, and must be a whole number from 1 to {number}, the"
            " number of experts."
        )


def _parameters(values: dict[str, Any]) -> int:
    """Estimate the parameters of a decoder from its configuration; 0 if it names no sizes."""

    def size(*keys: str) -> int:
        found = (values.get(key) for key in keys)
        return next((value for value in found if type(value) is int), 0)

    hidden = size("hidden_size", "n_embd", "d_model")
    mlp = size("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim")
    experts = max(1, size("num_experts", "num_local_experts", "n_routed_experts"))
    layer = hidden * (2 * hidden + 3 * mlp * experts)
    return layer * size("num_hidden_layers", "n_layer", "n_layers", "num_layers") + hidden * size("vocab_size")


# ---- weight files


def stored_shapes(folder: Path, origin: ModelOrigin, *, explicit: object = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a folder's safetensors files; empty for other formats. Reads no weights.

    explicit: the file that the configuration names (transformers_weights). Raises UserError for files that are missing,
    damaged or outside the folder.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder, origin, explicit=explicit):
        if path.suffix == ".safetensors":
            shapes |= shapes_in(path, origin)
    return shapes


def weight_files(folder: Path, origin: ModelOrigin, *, explicit: object = None) -> list[Path]:
    """Return the weight files of a folder that transformers would open. Raises UserError."""
    names: tuple[str, ...] = WEIGHT_FILES
    if explicit is not None:
        names = (_plain_name(explicit, folder / "config.json", origin, endings=(*ENDINGS, ".index.json")),)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        if any(folder.glob("shard-*-model-*.safetensors")):  # torch.distributed.checkpoint
            return sorted(folder.glob("*.safetensors"))
        raise origin.error(
            f"the weights of {folder} could not be loaded: it holds no {names[0]}.",
            hint="A folder needs model.safetensors; for random weights write model.init: random.",
        )
    if found.suffix != ".json":
        return [found]
    values = read_json(found, origin)
    index = values.get("weight_map")
    if not isinstance(values.get("metadata"), dict):
        raise origin.error(f"{found}: metadata is missing; it must be an object.")
    if not isinstance(index, dict) or not index:
        raise origin.error(f"{found}: weight_map is missing; it must map each weight to the file that holds it.")
    files = {_plain_name(name, found, origin) for name in index.values()}
    for name in sorted(files):
        if not (folder / name).is_file():
            raise origin.error(f"{found} names {name}, which is not in the folder.", hint="Was the download complete?")
    return [_inside(folder / name, folder, origin) for name in sorted(files)]


def hub_snapshot(name: str, revision: str) -> Path | None:
    """Return the folder of the hub's cache with a model's files, named by the commit; None if it is not there."""
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # the name of a folder that was removed
        return None
    return Path(found).parent if isinstance(found, str) else None


def fingerprint_of_files(folder: Path, origin: ModelOrigin, *, explicit: object = None) -> str:
    """Return a hash of a model folder's config.json and weight files, from samples of their bytes. Raises UserError.

    explicit: as of `stored_shapes`.
    """
    files = [folder / "config.json", *weight_files(folder, origin, explicit=explicit)]
    digests = [(file.name, digest_of(file)) for file in files]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:32]


def digest_of(file: Path) -> str:
    """Return a SHA-256 of the size and of samples of a file's bytes; of all bytes of a small one."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    step = max(size // SAMPLES, SAMPLE_BYTES)
    with file.open("rb") as opened:
        for start in range(0, size, step):
            opened.seek(start)
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _plain_name(name: object, file: Path, origin: ModelOrigin, endings: tuple[str, ...] = ENDINGS) -> str:
    """Return the name of a weight file. Raises UserError for a path, which could lead out of the folder."""
    if not isinstance(name, str) or re.search(r"[/\\\0]", name) or not name.endswith(endings):
        raise origin.error(
            f"{file} names {str(name)[:80]!r} as a weight file, and may only name a .safetensors or .bin file in its"
            " own folder."
        )
    return name


def _inside(path: Path, folder: Path, origin: ModelOrigin) -> Path:
    """Return the path. Raises UserError for a link out of the folder; the hub's cache links to a folder next to it."""
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    if root not in path.resolve().parents:
        raise origin.error(
            f"{path} is a link to {path.resolve()}, outside of the folder.", hint="Put the file itself there."
        )
    return path


def check_contents(folder: Path, origin: ModelOrigin) -> None:
    """Raise UserError for a link out of a folder that is copied or uploaded, and for a pipe or a device in it."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            _inside(path, folder, origin)
        if not (path.is_file() or path.is_dir()):
            raise origin.error(f"{path} is neither a file nor a folder.", hint="Remove it.")


def shapes_in(path: Path, origin: ModelOrigin) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a safetensors file. Raises UserError if it is damaged."""
    with loading(origin, f"{path} is not a complete safetensors file"), safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


# parameters that are allocated before transformers says that weights are missing
MAX_MISSING = 50_000_000


def check_amount(name: str, skeleton: nn.Module, shapes: dict[str, tuple[int, ...]], origin: ModelOrigin) -> None:
    """Raise UserError if the configuration describes a far larger model than the files hold, before it is allocated."""
    stored = sum(math.prod(shape) for shape in shapes.values())
    described = sum(parameter.numel() for parameter in skeleton.parameters())
    if shapes and described > 2 * stored + MAX_MISSING:
        raise shape_error(name, skeleton, shapes, origin) or origin.error(
            f"config.json of {name} describes {format_count(described)} parameters, and its weight files hold"
            f" {format_count(stored)}.",
            hint="Is its config.json that of another model?",
        )


def shape_error(
    name: str, skeleton: nn.Module, shapes: dict[str, tuple[int, ...]], origin: ModelOrigin
) -> UserError | None:
    """Return the error of the first weight whose shape is another one in config.json than in the files, or None."""
    for key, parameter in skeleton.named_parameters():
        if shapes.get(key, parameter.shape) != tuple(parameter.shape):
            return origin.error(
                f"config.json of {name} gives {key} the shape {list(parameter.shape)}, and its weight files hold"
                f" {list(shapes[key])}.",
                hint="Is its config.json that of another model?",
            )
    return None
