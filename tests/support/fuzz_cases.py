"""Random cases of bad input, from a seed: changes of recipes, models, adapters, data, templates, teachers and runs."""

import contextlib
import copy
import gzip
import io
import json
import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import yaml
from pyarrow import parquet

from ligertune.recipe.document import keys

ODD = (
    None, True, False, 0, -1, 1, 3, 0.5, -0.0, 10**6, 10**15, 2**31, 2**53, 10**19, 1e308, 1e-300, math.nan, math.inf,
    "", " ", "a", "auto", "yes", "null", "é", "\0", "x" * 300, "y/" * 3000, "🦙" * 99, "..", "/", "/dev/zero", "~",
    "{{", "%s", "model", "data.jsonl", [], {}, [[]], [None], ["a", "a"], {"a": 1}, {"": None}, [{}], [1e308, -1], ["("],
    ["(?:(\\w|.)+[!?])+"],
)  # fmt: skip
TYPICAL = {
    "integer": (0, 1, 2, 7, 1000, 10**6, 10**15), "number": (0.0, 1e-300, 1e-9, 0.5, 1.0, 3.5, 1e6, 1e308),
    "boolean": (True, False), "string": ("a", "é", "model", "data.jsonl", "/dev/zero", "x" * 300),
}  # fmt: skip
# Steps with these keys rightly take long, compile, or start other programs.
FIXED = {
    "train.max_steps": 1, "train.torch_compile": False, "parallel.num_processes": 1, "logging.report_to": "none",
    "data.num_proc": 1,
}  # fmt: skip
SNIPPETS = (
    "{{ messages[0].content }}", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n", "{% endfor %}",
    "{% if m %}", "{% endif %}", "{{ 'x' * 10**9 }}", "{{ 1 / 0 }}", "{{ 10**10**10 }}", "{% for i in range(99999) %}",
    "{{ ns.x }}", "{% set ns = namespace(x='a' * 99) %}", "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.x = [ns.x, ns.x] %}", "{{ bos_token }}", "{% macro f(n) %}{{ f(n) }}{% endmacro %}", "{{ f(1) }}",
    "{{ raise_exception('no') }}", "{% generation %}", "{% endgeneration %}", "{{ m.content | center(10**8) }}",
    "{{ messages | tojson(indent=9999) }}", "{{ x.y.z }}", "{%", "}}", "{{ '%999999999d' % 1 }}",
    "{{ m.content.replace('', m.content) }}", "{{ loop.index }}", "{{ ''.__class__ }}", "\udcff",
)  # fmt: skip


ADAPTER_KEYS = {
    "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "exclude_modules": "x", "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {".*q_proj": 4}, "modules_to_save": ["lm_head"], "layers_to_transform": [0],
    "layers_pattern": "layers", "trainable_token_indices": [3], "target_parameters": ["a"], "peft_type": "LORA",
    "base_model_name_or_path": "model", "init_lora_weights": "pissa", "layer_replication": [[0, 2]], "use_dora": True,
    "lora_dropout": 0.1, "bias": "all", "task_type": "SEQ_CLS", "loftq_config": {"loftq_iter": 1},
}  # fmt: skip
EXPRESSIONS = (
    "^(([a-z._0-9])+.)+[A-Z]([a-z])+$", "(\\w+\\s?)+#", "(?:(\\w|.)+[!?])+", "((a{999}){999}){999}", "(?R)", "((", ".*",
    "[qv]_proj", "a" * 5000, "all-linear",
)  # fmt: skip
STEPS = (
    {"type": "Replace", "pattern": {"Regex": "(\\w+\\s?)+#"}, "content": "x"},
    {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "ab"},
    {"type": "Split", "pattern": {"Regex": "(a|aa)+!"}, "behavior": "Isolated", "invert": False},
    {"type": "Lowercase"}, {"type": "Strip", "content": "a", "start": 10**9, "stop": 0}, {"type": "ByteLevel"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}, {"type": "Prepend", "prepend": "x" * 10**5},
)  # fmt: skip
IMPORTS = (
    "base_model: model\ndatasets: [{path: data.jsonl, type: alpaca}]\nadapter: lora\nlora_r: 8\nmicro_batch_size: 2\n"
    "gradient_accumulation_steps: 4\nnum_epochs: 1\noutput_dir: out\nval_set_size: 0.1\nfp8: false\n",
    "stage: sft\nmodel_name_or_path: model\ndataset: alpaca\ntemplate: llama3\nfinetuning_type: lora\noutput_dir: out\n"
    "cutoff_len: 256\nper_device_train_batch_size: 1\n",
    "model_name_or_path: model\ndataset_name: a/b\nuse_peft: true\noutput_dir: out\nmax_length: 256\n"
    "learning_rate: 1.0e-5\neval_strategy: steps\n",
)


@dataclass(frozen=True)
class FuzzCase:
    """A command in `folder`. outputs: names below it that the command may write to; None: any."""

    name: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...] | None = ("runs", "out")


class CaseMaker:
    """Makes the cases of a seed.

    base: a folder with r.yaml, model, adapter, teacher, data.jsonl and an unfinished run, runs/one.
    """

    def __init__(self, base: Path, seed: int) -> None:
        self.base, self.seed = base, seed
        self.recipe = yaml.safe_load((base / "r.yaml").read_text())

    def make(self, number: int, folder: Path) -> FuzzCase:
        """Fill the new folder, and return the case."""
        rng = random.Random(f"{self.seed}:{number}")
        kinds = (
            self._recipe,
            self._recipe,
            self._data,
            self._data,
            self._model,
            self._model,
            self._template,
            self._checkpoint,
            self._recipe,
            self._adapter,
            self._adapter,
            self._tokenizer,
            self._labels,
            self._teacher,
            self._run_file,
            self._import,
        )
        kind = kinds[number % len(kinds)]
        needed = {self._checkpoint: "runs", self._run_file: "runs", self._adapter: "adapter", self._teacher: "teacher"}
        others = {"runs", "adapter", "teacher"} - {needed.get(kind)}
        shutil.copytree(self.base, folder, ignore=shutil.ignore_patterns(*others))
        return kind(rng, folder)

    def _recipe(self, rng: random.Random, folder: Path) -> FuzzCase:
        text = (self.base / "r.yaml").read_text()
        changed = []
        if rng.random() < 0.25:
            text, changed = mutate_bytes(rng, text.encode()).decode("utf-8", "replace"), ["bytes"]
        else:
            recipe = copy.deepcopy(self.recipe)
            named = [key for key in keys() if key and "[]" not in key and "properties" not in keys()[key]]
            for _ in range(rng.choice((1, 1, 2, 3))):
                changed.append(rng.choice(named))
                put(recipe, changed[-1], self._value(rng, changed[-1]))
            text = yaml.safe_dump(recipe, allow_unicode=True)
        (folder / "r.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        command = rng.choice(("check", "check", "check", "plan", "data", "train"))
        arguments = ["recipe", "check", "r.yaml"] if command == "check" else [command, "r.yaml", *sets(FIXED)]
        named = {"checkpoint.output_dir", "data.cache", "bytes"} & set(changed)
        return FuzzCase(f"recipe: {command}: {', '.join(changed)}", tuple(arguments), None if named else ("runs",))

    def _value(self, rng: random.Random, key: str) -> object:
        """Return an odd value, or in half of the cases one of a type that the key takes."""
        entries = keys()[key].get("anyOf", [keys()[key]])
        choices = [choice for entry in entries for choice in entry.get("enum", TYPICAL.get(entry.get("type"), ()))]
        return rng.choice(choices) if choices and rng.random() < 0.5 else rng.choice(ODD)

    def _data(self, rng: random.Random, folder: Path) -> FuzzCase:
        rows = [json.loads(line) for line in (self.base / "data.jsonl").read_text().splitlines()]
        for _ in range(rng.choice((0, 1, 1, 3))):
            mutate_json(rng, rows)
        ending = rng.choice((".jsonl", ".jsonl", ".json", ".csv", ".txt", ".parquet", ".jsonl.gz", ".json.gz"))
        content = write_rows(rows, ending)
        if rng.random() < 0.6:
            content = mutate_bytes(rng, content)
        (folder / f"d{ending}").write_bytes(content)
        settings = {
            "data.datasets[0].path": f"d{ending}",
            "data.datasets[0].on_bad_row": rng.choice(("drop", "repair", "error")),
            "data.max_dropped": 1,
            "data.max_record_bytes": rng.choice((100, 2**24)),
            "data.streaming": rng.random() < 0.3,
            "train.max_steps": 1,
        }
        return FuzzCase(f"data: {ending}", ("data", "r.yaml", *sets(settings)), ())

    def _template(self, rng: random.Random, folder: Path) -> FuzzCase:
        text = "".join(rng.choice(SNIPPETS) for _ in range(rng.randint(1, 8)))
        content = text.encode("utf-8", "surrogateescape")
        if rng.random() < 0.5:
            (folder / "t.jinja").write_bytes(content)
            return FuzzCase(
                f"template: {text[:60]}", ("data", "r.yaml", *sets({"data.prompt_template": "t.jinja"})), ()
            )
        (folder / "model" / "chat_template.jinja").write_bytes(content)
        arguments = ("generate", "./model", "Hi.", "--max-new-tokens", "2")
        return FuzzCase(f"template of a model: {text[:60]}", arguments, ())

    def _model(self, rng: random.Random, folder: Path) -> FuzzCase:
        file = rng.choice(sorted(path for path in (folder / "model").iterdir() if path.is_file()))
        name = f"model: {file.name}: {mutate_file(rng, file)}"
        if rng.random() < 0.15:
            index = {"weight_map": {"model.norm.weight": rng.choice(("../x.safetensors", "model.safetensors", 5, ""))}}
            (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(rng.choice((index, [], {}, 1))))
            name += ", index"
        command = rng.choice(("generate", "plan", "train", "export"))
        arguments = {
            "generate": ("generate", "./model", "Hi.", "--max-new-tokens", "2"),
            "export": ("export", "./model", "--out", "out"),
        }.get(command, (command, "r.yaml", *sets(FIXED)))
        return FuzzCase(f"{name}: {command}", arguments)

    def _checkpoint(self, rng: random.Random, folder: Path) -> FuzzCase:
        files = sorted(path for path in (folder / "runs" / "one").rglob("*") if path.is_file())
        names = []
        for _ in range(rng.choice((1, 1, 2))):
            file = rng.choice(files)
            if file.is_file():
                names.append(f"{file.relative_to(folder / 'runs' / 'one')}: {mutate_file(rng, file)}")
        if rng.random() < 0.6:
            arguments = ("train", "r.yaml", "--resume")
        else:
            arguments = ("export", "runs/one/checkpoints/step-2", "--out", "out")
        return FuzzCase(f"checkpoint: {', '.join(names)}: {arguments[0]}", arguments)

    def _adapter(self, rng: random.Random, folder: Path) -> FuzzCase:
        config, changed = folder / "adapter" / "adapter_config.json", []
        if rng.random() < 0.7:
            values = json.loads(config.read_text())
            for key in rng.sample(sorted(ADAPTER_KEYS), rng.choice((1, 1, 2))):
                value = rng.choice((rng.choice(ODD), rng.choice(EXPRESSIONS), copy.deepcopy(ADAPTER_KEYS[key])))
                if rng.random() < 0.3:
                    value = rng.choice(([value], {str(value): rng.choice(ODD)}, [value] * 1000))
                elif isinstance(value, dict | list):
                    mutate_json(rng, value)
                values[key] = value
                changed.append(key)
            config.write_text(json.dumps(values))
        else:
            file = rng.choice(sorted(path for path in (folder / "adapter").iterdir() if path.is_file()))
            changed.append(f"{file.name}: {mutate_file(rng, file)}")
        command = rng.choice((
            ("generate", "./adapter", "Hi.", "--max-new-tokens", "2"),
            ("export", "./adapter", "--out", "out"),
            ("export", "./adapter", "--out", "out", "--adapter"),
        ))  # fmt: skip
        return FuzzCase(f"adapter: {', '.join(changed)}: {command[0]}", command, ("out",))

    def _tokenizer(self, rng: random.Random, folder: Path) -> FuzzCase:
        path = folder / "model" / "tokenizer.json"
        values, part = json.loads(path.read_text()), rng.choice(("normalizer", "pre_tokenizer", "decoder"))
        kind = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[part]
        steps = [copy.deepcopy(rng.choice(STEPS)) for _ in range(rng.choice((1, 1, 2, 4)))]
        if rng.random() < 0.3:
            mutate_json(rng, steps)
        values[part] = {"type": "Sequence", kind: steps}
        path.write_text(json.dumps(values))
        arguments = rng.choice((("generate", "./model", "Hi.", "--max-new-tokens", "2"), ("data", "r.yaml")))
        types = ", ".join(str(step.get("type")) for step in steps if isinstance(step, dict))
        return FuzzCase(f"tokenizer: {part}: {types}", arguments, ())

    def _labels(self, rng: random.Random, folder: Path) -> FuzzCase:
        odd = [value for value in ODD if value not in (math.inf,) and value == value]
        kinds = ([0, 1], ["good", "bad"], [0.05, 0.5, 1.0], odd, [0, 10**9], [[0, 1], [1]], [True, False])
        labels = rng.choice(kinds)
        rows = [{"text": f"Text {number}.", "label": rng.choice(labels)} for number in range(12)]
        for _ in range(rng.choice((0, 1, 3))):
            rng.choice(rows)["label"] = rng.choice(ODD)
        (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"task": "classification", "data.datasets[0].path": "d.jsonl", "data.max_dropped": 1}
        if rng.random() < 0.3:
            settings["classification.num_labels"] = rng.choice((0, 1, 2, 3, 1000, 10**9, 10**15))
        if rng.random() < 0.3:
            settings["classification.labels"] = rng.choice((["a", "b"], ["good", "bad"], ["0", "1"], [""], [1]))
        command = rng.choice(("data", "plan", "train"))
        return FuzzCase(f"labels: {command}", (command, "r.yaml", *sets({**FIXED, **settings})))

    def _teacher(self, rng: random.Random, folder: Path) -> FuzzCase:
        file = rng.choice(sorted(path for path in (folder / "teacher").iterdir() if path.is_file()))
        name = f"teacher: {file.name}: {mutate_file(rng, file)}"
        settings = {**FIXED, "task": "distill", "distill.teacher_file": "teacher", "distill.loss": "forward_kl"}
        return FuzzCase(name, (rng.choice(("train", "plan")), "r.yaml", *sets(settings)))

    def _run_file(self, rng: random.Random, folder: Path) -> FuzzCase:
        run = folder / "runs" / "one"
        file = rng.choice([run / "metrics.jsonl"] * 3 + sorted(path for path in run.iterdir() if path.is_file()))
        if file.suffix == ".jsonl" and rng.random() < 0.8:
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            for _ in range(rng.choice((1, 2))):
                mutate_json(rng, lines)
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            how = "values"
        else:
            how = mutate_file(rng, file)
        arguments = rng.choice(
            (("train", "r.yaml", "--resume"), ("export", "runs/one", "--checkpoint", "newest", "--out", "out"))
        )
        return FuzzCase(f"run file: {file.name}: {how}: {arguments[0]}", arguments)

    def _import(self, rng: random.Random, folder: Path) -> FuzzCase:
        text, names = rng.choice(IMPORTS), sorted({key for part in IMPORTS for key in yaml.safe_load(part)})
        values = yaml.safe_load(text)
        for _ in range(rng.choice((1, 2, 4))):
            values[rng.choice(names)] = rng.choice(ODD)
        if rng.random() < 0.3:
            mutate_json(rng, values)
        content = yaml.safe_dump(values, allow_unicode=True).encode("utf-8", "surrogatepass")
        (folder / "x.yaml").write_bytes(mutate_bytes(rng, content) if rng.random() < 0.3 else content)
        return FuzzCase(
            "import", ("recipe", "import", "x.yaml", *rng.choice(((), ("--out", "out.yaml")))), ("out.yaml",)
        )


def put(recipe: dict, key: str, value: object) -> None:
    """Set a dotted key, in sections that are mappings."""
    *sections, name = key.split(".")
    for section in sections:
        inner = recipe.get(section)
        recipe[section] = inner if isinstance(inner, dict) else {}
        recipe = recipe[section]
    recipe[name] = value


def sets(settings: dict[str, object]) -> tuple[str, ...]:
    """Return the options --set for these settings."""
    return tuple(word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}"))


def write_rows(rows: list, ending: str) -> bytes:
    """Return a data file of this ending."""
    if ending == ".parquet":
        out = io.BytesIO()
        with contextlib.suppress(pyarrow.ArrowException, TypeError, OverflowError, AttributeError):
            parquet.write_table(pyarrow.Table.from_pylist(rows), out)  # nested columns, if the rows are alike
            return out.getvalue()
        parquet.write_table(
            pyarrow.table({"instruction": [str(row) for row in rows], "output": ["a"] * len(rows)}), out
        )
        return out.getvalue()
    if ending == ".csv":
        return ("instruction,output\n" + "".join(f"{json.dumps(row)!r},b\n" for row in rows)).encode()
    is_list = ending.startswith(".json") and not ending.startswith(".jsonl")
    text = json.dumps(rows) if is_list else "".join(json.dumps(row) + "\n" for row in rows)
    return gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode()


def mutate_json(rng: random.Random, value: object) -> None:
    """Change one place of a value of lists and mappings: another value, none, one more, or a copy of another place."""
    while isinstance(value, dict | list) and value:
        place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[place], dict | list) and value[place] and rng.random() < 0.8:
            value = value[place]
            continue
        how = rng.randrange(4)
        if how == 0:
            del value[place]
        elif how == 1 and isinstance(value, dict):
            value[str(place) + "_"] = value.pop(place)
        else:
            value[place] = rng.choice([odd for odd in ODD if odd == odd and odd not in (math.inf,)])
        return


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, remove, insert or repeat bytes, or cut the end off."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        end, new = rng.choice((
            (at + 1, bytes([rng.randrange(256)])),
            (at + rng.choice((1, 3, 50)), b""),
            (at, rng.randbytes(rng.choice((1, 4, 40)))),
            (at, rng.choice((b'"', b"{", b"[", b"\n", b"\0", b": ", b"- ", b"&a ", b"*a "))),
            (at, changed[at : at + rng.choice((10, 1000))] * rng.choice((1, 20))),
            (len(changed), b""),
        ))  # fmt: skip
        changed[at:end] = new
    return bytes(changed)


def mutate_file(rng: random.Random, file: Path) -> str:
    """Change a file: its JSON, its bytes, or all of it. Return what was done."""
    content = file.read_bytes()
    values = _values(content) if file.suffix == ".json" and rng.random() < 0.6 else None
    if values is not None:
        for _ in range(rng.choice((1, 1, 2))):
            mutate_json(rng, values)
        if rng.random() < 0.1:
            values = rng.choice(([], None, {}, "", 5, [values]))
        file.write_text(json.dumps(values))
        return "values"
    if file.suffix == ".safetensors" and rng.random() < 0.4:
        file.write_bytes(_other_header(rng, content))
        return "header"
    if rng.random() < 0.15:
        file.unlink()
        return "removed"
    if rng.random() < 0.15:
        file.write_bytes(rng.choice((b"", b"\0" * 99, b"null", b"x", rng.randbytes(2000))))
        return "replaced"
    file.write_bytes(mutate_bytes(rng, content))
    return "bytes"


def _other_header(rng: random.Random, content: bytes) -> bytes:
    """Return a safetensors file with changed values in its header: names, shapes, dtypes and places."""
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + size])
    except ValueError:  # an earlier change has broken it
        return content[:-1]
    mutate_json(rng, header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _values(content: bytes) -> object | None:
    """Return the values of a JSON file; None if an earlier change has broken it."""
    try:
        return json.loads(content)
    except ValueError:
        return None
