"""Random cases of bad input, from a seed: recipes, models, adapters, teachers, runs, data, labels, imports."""

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
    "train.gradient_accumulation_steps": 1, "data.num_proc": 1,
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


HOSTILE_PATTERNS = ("^(([a-z._0-9])+.)+[A-Z]([a-z])+$", "(a|a)*b", "(", "(?:(\\w|.)+[!?])+", ".*", "q_proj", "")
ADAPTER_KEYS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters", "peft_type",
    "task_type", "base_model_name_or_path", "revision", "use_dora", "use_rslora", "bias", "init_lora_weights",
)  # fmt: skip
IMPORTS = Path(__file__).resolve().parents[2] / "recipe" / "imports.yaml"
TOOLS = ("axolotl", "llama_factory", "trl", "whole")
# Folders of the base that only the cases of their kind copy.
OWN_FOLDERS = ("runs", "adapter", "teacher")


@dataclass(frozen=True)
class FuzzCase:
    """A command in `folder`. outputs: names below it that the command may write to; None: any."""

    name: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...] | None = ("runs", "out")


class CaseMaker:
    """Makes the cases of a seed.

    base: a folder with r.yaml, model, data.jsonl, adapter, teacher, and an unfinished run in runs/one.
    """

    def __init__(self, base: Path, seed: int) -> None:
        self.base, self.seed = base, seed
        self.recipe = yaml.safe_load((base / "r.yaml").read_text())
        cases = yaml.load(IMPORTS.read_text("utf-8"), Loader=yaml.CSafeLoader)
        self.imports = [case[tool] for case in cases for tool in TOOLS if tool in case]

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
            self._adapter,
            self._teacher,
            self._metrics,
            self._labels,
            self._table,
            self._import,
        )
        kind = kinds[number % len(kinds)]
        kept = {self._checkpoint: "runs", self._metrics: "runs", self._adapter: "adapter", self._teacher: "teacher"}
        skipped = [name for name in OWN_FOLDERS if name != kept.get(kind)]
        shutil.copytree(self.base, folder, ignore=shutil.ignore_patterns(*skipped))
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
        place = folder / "adapter"
        if rng.random() < 0.6:
            name = rng.choice(ADAPTER_KEYS)
            config = json.loads((place / "adapter_config.json").read_text())
            config[name] = rng.choice((*ODD, *HOSTILE_PATTERNS, [30_000_000], {"q_proj": 10**9}, {"(a|a)*b": 4}))
            (place / "adapter_config.json").write_text(json.dumps(config))
            changed = name
        else:
            file = rng.choice(sorted(path for path in place.iterdir() if path.is_file()))
            changed = f"{file.name}: {mutate_file(rng, file)}"
        arguments = rng.choice((
            ("generate", "./adapter", "Hi.", "--max-new-tokens", "2"),
            ("export", "./adapter", "--out", "out"),
        ))  # fmt: skip
        return FuzzCase(f"adapter: {changed}: {arguments[0]}", arguments)

    def _teacher(self, rng: random.Random, folder: Path) -> FuzzCase:
        file = rng.choice(sorted(path for path in (folder / "teacher").iterdir() if path.is_file()))
        name = f"teacher: {file.name}: {mutate_file(rng, file)}"
        settings = {"task": "distill", "distill.teacher_file": "teacher", "distill.loss": "forward_kl", **FIXED}
        return FuzzCase(name, (rng.choice(("plan", "train")), "r.yaml", *sets(settings)), ("runs",))

    def _metrics(self, rng: random.Random, folder: Path) -> FuzzCase:
        """Lines of metrics.jsonl that pass as JSON, before a resume."""
        path = folder / "runs" / "one" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for _ in range(rng.choice((1, 2, 5))):
            line = rng.choice(lines)
            name = rng.choice((*line, "step", "eval_loss", "samples", "loss", "tokens"))
            line[name] = rng.choice([odd for odd in ODD if odd == odd])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return FuzzCase("metrics", ("train", "r.yaml", "--resume"), ("runs",))

    def _labels(self, rng: random.Random, folder: Path) -> FuzzCase:
        labels = rng.choice(([0, 1], [0.5, 1.5], ["yes", "no"], [[0], [0, 1]], [[0.0, 1.0], [1.0, 0.0]]))
        rows = [{"text": f"a text of {number}", "label": labels[number % 2]} for number in range(24)]
        for _ in range(rng.choice((1, 2, 12))):
            rng.choice(rows)["label"] = rng.choice((*ODD, 10**9, 10**30, "NaN", [10**9], [math.nan, 1.0]))
        (folder / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"task": "classification", "data.datasets[0].path": "l.jsonl", "data.max_dropped": 1, **FIXED}
        if rng.random() < 0.3:
            settings["classification.num_labels"] = rng.choice((0, 1, 2, 10**9, 10**30))
        return FuzzCase("labels", (rng.choice(("data", "plan", "train")), "r.yaml", *sets(settings)), ("runs",))

    def _table(self, rng: random.Random, folder: Path) -> FuzzCase:
        rows = [json.loads(line) for line in (self.base / "data.jsonl").read_text().splitlines()]
        ending = rng.choice((".parquet", ".arrow", ".feather", ".parquet.gz", ".arrow.zst"))
        content = table_of(rng, rows, ending)
        content = mutate_bytes(rng, content) if rng.random() < 0.7 else content
        (folder / f"t{ending}").write_bytes(content)
        settings = {"data.datasets[0].path": f"t{ending}", "data.max_dropped": 1, "data.streaming": rng.random() < 0.3}
        return FuzzCase(f"table: {ending}", ("data", "r.yaml", *sets({**settings, **FIXED})), ())

    def _import(self, rng: random.Random, folder: Path) -> FuzzCase:
        text = rng.choice(self.imports)
        if rng.random() < 0.5:
            text = mutate_bytes(rng, text.encode()).decode("utf-8", "replace")
        else:
            values = yaml.load(text, Loader=yaml.CSafeLoader)
            if isinstance(values, dict) and values:
                values[rng.choice(list(values))] = rng.choice([odd for odd in ODD if odd == odd])
                values |= {"base_model": "a/b"} if rng.random() < 0.5 else {}
                text = yaml.safe_dump(values, allow_unicode=True)
        (folder / "other.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        return FuzzCase("import", ("recipe", "import", "other.yaml"), ())


def table_of(rng: random.Random, rows: list[dict], ending: str) -> bytes:
    """Return a parquet or Arrow file of the rows, some of whose columns have another type."""
    written = pyarrow.array([rng.choice(("{", "[1]", "null"))] * len(rows))
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in ("instruction", "output")}
    name = rng.choice(("instruction", "output", "messages", "other"))
    column = rng.choice((
        pyarrow.array([{"role": "user", "a": None}] * len(rows)),
        pyarrow.array([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * len(rows)),
        pyarrow.array(["a"] * len(rows)).dictionary_encode(),
        pyarrow.array([b"\xff"] * len(rows)),
        pyarrow.array([10**6] * len(rows), pyarrow.timestamp("us")),
        pyarrow.ExtensionArray.from_storage(pyarrow.json_(), written),
        pyarrow.nulls(len(rows)),
    ))  # fmt: skip
    table = pyarrow.table({**columns, name: column})
    out = io.BytesIO()
    if ".parquet" in ending:
        parquet.write_table(table, out)
    else:
        make = pyarrow.ipc.new_stream if rng.random() < 0.5 else pyarrow.ipc.new_file
        with make(out, table.schema) as writer:
            writer.write_table(table)
    content = out.getvalue()
    if ending.endswith(".gz"):
        return gzip.compress(content, mtime=0)
    return pyarrow.compress(content, "zstd", asbytes=True) if ending.endswith(".zst") else content


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
        parquet.write_table(
            pyarrow.table({"instruction": [str(row) for row in rows], "output": ["a"] * len(rows)}), out
        )
        return out.getvalue()
    if ending == ".csv":
        return ("instruction,output\n" + "".join(f"{json.dumps(row)!r},b\n" for row in rows)).encode()
    is_list = ending.startswith(".json") and not ending.startswith(".jsonl")
    text = json.dumps(rows) if is_list else "".join(json.dumps(row) + "\n" for row in rows)
    return gzip.compress(text.encode(), mtime=0) if ending.endswith(".gz") else text.encode()


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
            odd = rng.choice([odd for odd in ODD if odd == odd and odd not in (math.inf,)])
            value[place] = copy.deepcopy(odd)  # later mutations change it, and must not change ODD
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
    if rng.random() < 0.15:
        file.unlink()
        return "removed"
    if rng.random() < 0.15:
        file.write_bytes(rng.choice((b"", b"\0" * 99, b"null", b"x", rng.randbytes(2000))))
        return "replaced"
    file.write_bytes(mutate_bytes(rng, content))
    return "bytes"


def _values(content: bytes) -> object | None:
    """Return the values of a JSON file; None if an earlier change has broken it."""
    try:
        return json.loads(content)
    except ValueError:
        return None
