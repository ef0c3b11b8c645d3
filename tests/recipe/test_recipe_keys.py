"""Every key of the schema: its description, and the values that it refuses."""

import pytest

from ligertune.recipe import Recipe, TrainSpec, recipe_schema
from ligertune.recipe.aliases import ALIASES, KEY_OF_ALIAS
from ligertune.recipe.document import keys
from ligertune.recipe.train_sections import EITHER_OR

SECTIONS = [key for key, entry in keys().items() if key and entry.get("type") == "object" and "properties" in entry]
LEAVES = [key for key in keys() if key and key not in SECTIONS and not key.endswith("[]")]


def test_every_key_has_a_description_of_one_line():
    described = {key: keys()[key].get("description", "") for key in [*LEAVES, *SECTIONS]}
    assert not {key: text for key, text in described.items() if not text.endswith(".") or "\n" in text or len(text) < 6}


@pytest.mark.parametrize("key", LEAVES)
def test_a_value_of_the_wrong_type_is_refused(key, required, complaints):
    name, *needed = override_for(key)
    kinds = {entry.get("type") for entry in (keys()[key], *keys()[key].get("anyOf", ()))}
    wrong = "3" if kinds & {"array", "object"} else "[wrong]"
    wrong = "0.5" if key == "method.layers_to_transform" else wrong  # 3 is a layer, as in PEFT
    (found,) = complaints(required, *needed, f"{name}={wrong}")
    assert found.startswith(f"--set {name}={wrong}: {name} is {wrong[0]}") and "; it must be " in found


@pytest.mark.parametrize("key", LEAVES)
def test_null_is_refused_unless_the_key_accepts_it(key, required, load, complaints):
    name, *needed = override_for(key)
    if {"type": "null"} in keys()[key].get("anyOf", []) and key.removeprefix("train.") not in EITHER_OR:
        assert load(required, *needed, f"{name}=null")
    elif key == "checkpoint.resume_from_checkpoint":  # transformers writes null for never
        assert load(required, f"{name}=null").checkpoint.resume_from_checkpoint == "never"
    else:
        (found,) = complaints(required, *needed, f"{name}=null")
        assert found.startswith(f"--set {name}=null: {name} is null")


def override_for(key: str) -> tuple[str, ...]:
    """Return the key as an override names it, and the overrides that it needs before it."""
    items = {
        "data.eval_datasets": ("data.eval_datasets[0].path=d",),
        "sample.score": ("sample.score[0].function=f.py:f",),
        "train.lr_groups": (
            "train.lr_groups[0].parameters=p",
            "train.lr_groups[0].weight_decay=0.1",
            "train.lr_groups[0].learning_rate=0.1",
        ),
    }
    item = items.get(key.partition("[]")[0], ()) if "[]" in key else ()
    return (key.replace("[]", "[0]"), *item)


def test_sections_are_frozen_and_forbid_unknown_keys():
    with pytest.raises(ValueError, match="frozen"):
        TrainSpec().seed = 1
    with pytest.raises(ValueError, match="Extra inputs"):
        TrainSpec(sead=1)


def test_a_given_key_replaces_the_default_of_its_rival():
    train = TrainSpec(max_steps=5, global_batch_size=8, warmup_steps=0)
    assert (train.num_train_epochs, train.gradient_accumulation_steps, train.warmup_ratio) == (None, None, None)


def test_every_alias_has_a_key_and_hides_no_other_key():
    assert {row.key for row in ALIASES} <= set(keys())
    hidden = {f"{key.rpartition('.')[0]}.{name}" for name, key in KEY_OF_ALIAS.items() if "." in key} & set(keys())
    # other tools write these keys at the top level
    assert hidden == {"train.seed", "train.fp8", "checkpoint.output_dir"}
    names = [name for row in ALIASES for name in row.names if "[]" not in row.key]
    assert len(names) == len(set(names))


def test_the_json_schema_forbids_unknown_keys_and_requires_three():
    schema = recipe_schema()
    assert schema["required"] == ["model", "data", "checkpoint"]
    assert all(spec["additionalProperties"] is False for spec in (schema, *schema["$defs"].values()))
    required = {name: spec["required"] for name, spec in schema["$defs"].items() if "required" in spec}
    assert required == {
        "ModelSpec": ["model_name_or_path"],
        "DataSpec": ["datasets"],
        "DatasetSpec": ["path"],
        "CheckpointSpec": ["output_dir"],
        "LrGroupSpec": ["parameters"],
        "ScoreFunctionSpec": ["function"],
    }
    assert set(schema["properties"]) == set(Recipe.model_fields)
