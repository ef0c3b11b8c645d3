"""Rows with images in all the forms that data sets write them, and rows that cannot be used."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import tiny_vlms
from asked_rows import asked
from PIL import Image

from ligertune.errors import UserError

FAMILY = "qwen2_vl"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def text_of(prepared, tokenizer, index: int = 0) -> str:
    """An example as text, each image as one token."""
    ids = prepared.train[index].input_ids.tolist()
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return tokenizer.decode([t for i, t in enumerate(ids) if t != pad or ids[i - 1] != pad])


def question_of(prepared, tokenizer, index: int = 0) -> str:
    return text_of(prepared, tokenizer, index).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]


def data_url(path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def rows_of(form: str, red: str) -> dict:
    """The same question in different forms."""
    answer = {"role": "assistant", "content": "Yes"}
    turns = [{"role": "user", "content": "What is<image>this?"}, answer]
    said = [{"from": "human", "value": "What is<image>this?"}, {"from": "gpt", "value": "Yes"}]
    parts = [{"type": "text", "text": "What is"}, {"type": "image"}, {"type": "text", "text": "this?"}]
    own = [parts[0], {"type": "image", "image": red}, parts[2]]
    url = [parts[0], {"type": "image_url", "image_url": {"url": red}}, parts[2]]
    return {
        "llava": {"image": red, "conversations": said},
        "sharegpt": {"images": [red], "conversations": said},
        "messages": {"images": [red], "messages": turns},
        "parts filled from the column": {"images": [red], "messages": [{"role": "user", "content": parts}, answer]},
        "parts with their own": {"messages": [{"role": "user", "content": own}, answer]},
        "openai": {"messages": [{"role": "user", "content": url}, answer]},
        "alpaca": {"images": [red], "instruction": "What is<image>this?", "output": "Yes"},
        "prompt_completion": {"image": red, "prompt": [turns[0]], "completion": [answer]},
    }[form]


FORMS = ("llava", "sharegpt", "messages", "parts filled from the column", "parts with their own", "openai", "alpaca",
         "prompt_completion")  # fmt: skip


@pytest.mark.parametrize("reference", ["path", "file url", "data url"])
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_example(form, reference, prepared_for, pictures, tokenizer_of):
    red = {"path": str, "file url": lambda path: f"file://{path}", "data url": data_url}[reference](pictures["red"])
    prepared = prepared_for(FAMILY, [rows_of(form, red)], prompt_template="chat")
    example, tokenizer = prepared.train[0], tokenizer_of(FAMILY)
    assert question_of(prepared, tokenizer) == f"What is{IMAGE}this?"
    assert tokenizer.decode(example.labels[example.labels != -100]) == "Yes<|im_end|>"
    assert [Path(path).read_bytes() for path in example.images] == [pictures["red"].read_bytes()]


def test_a_parquet_file_of_a_hub_data_set_holds_its_images(prepared_for, pictures, tokenizer_of, tmp_path):
    import datasets

    rows = {"image": [str(pictures["red"]), str(pictures["blue"])], "prompt": ["What is <image>"] * 2,
            "completion": ["red", "blue"]}  # fmt: skip
    rows = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    rows.to_parquet(tmp_path / "rows.parquet")
    prepared = prepared_for(FAMILY, tmp_path / "rows.parquet", prompt_template="chat")
    for example, colour in zip(prepared.train, ("red", "blue"), strict=True):
        assert Image.open(example.images[0]).getpixel((0, 0)) == Image.open(pictures[colour]).getpixel((0, 0))


@pytest.mark.parametrize("streaming", [False, True])
def test_image_columns_of_the_hub_are_not_decoded(streaming, pictures):
    import datasets

    from ligertune.data.rows.sources import without_decoding

    paths = [str(pictures["red"]), str(pictures["blue"])]
    rows = datasets.Dataset.from_dict({"image": paths, "images": [paths, paths[:1]]})
    rows = rows.cast_column("image", datasets.Image()).cast_column("images", datasets.Sequence(datasets.Image()))
    found = list(without_decoding(rows.to_iterable_dataset() if streaming else rows))
    assert [row["image"]["path"] for row in found] == paths
    assert [len(row["images"]) for row in found] == [2, 1] and set(found[0]["images"][1]) == {"bytes", "path"}


def test_several_images_keep_their_order(prepared_for, pictures, tokenizer_of):
    row = asked("<image>\n<image> and\n<image>", "a system", *(pictures[c] for c in ("green", "red", "green")))
    prepared = prepared_for(FAMILY, [row])
    assert question_of(prepared, tokenizer_of(FAMILY)) == f"{IMAGE}{IMAGE} and{IMAGE}"
    assert [path.rpartition("/")[2] for path in prepared.train[0].images] == ["green.png", "red.png", "green.png"]


def test_images_without_marks_stand_before_the_first_question(prepared_for, pictures, tokenizer_of):
    prepared = prepared_for(FAMILY, [asked("What is this?", "Yes", pictures["red"], pictures["blue"])])
    assert question_of(prepared, tokenizer_of(FAMILY)) == f"{IMAGE}{IMAGE}What is this?"


def test_relative_paths_start_from_the_data_or_from_image_dir(prepared_for, pictures, tmp_path):
    row = asked("<image>What?", "Yes", "red.png")
    with pytest.raises(UserError, match=r"image is missing.*red\.png"):
        prepared_for(FAMILY, [row])
    found = prepared_for(FAMILY, [row], image_dir=str(pictures["red"].parent)).train[0].images
    assert found == (str(pictures["red"]),)
    (tmp_path / "red.png").write_bytes(pictures["red"].read_bytes())
    assert prepared_for(FAMILY, [row]).train[0].images == (str(tmp_path / "red.png"),)


@pytest.fixture
def broken(pictures, tmp_path):
    """Files that are no sound picture, by what is wrong with them."""
    noise = Image.effect_noise((200, 200), 80).convert("RGB")
    whole = io.BytesIO()
    noise.save(whole, "JPEG")
    contents = {"cut off": whole.getvalue()[: len(whole.getvalue()) // 2], "no picture": b"hello", "empty": b""}
    for name, content in contents.items():
        (tmp_path / f"{name}.jpg").write_bytes(content)
    Image.new("RGB", (1000, 4)).save(tmp_path / "too narrow.png")
    return {path.stem: path for path in tmp_path.iterdir()}


BAD = {
    "cut off": ("image cannot be read", "cut off.jpg"),
    "no picture": ("image cannot be read", "no picture.jpg"),
    "empty": ("image cannot be read", "empty.jpg"),
    "too narrow": ("image cannot be read", "1000 x 4 is too narrow"),
    "missing": ("image is missing", "missing.jpg"),
    "http": ("image on the network", "https://example.com/a.png"),
    "not base64": ("image cannot be read", "a data URL"),
    "null": ("image cannot be read", "None is neither"),
    "two marks": ("image marks do not fit", "2 marks for 1 images"),
    "a mark too few": ("image marks do not fit", "1 marks for 2 images"),
    "no image": ("image marks do not fit", "1 marks for 0 images"),
    "in the answer": ("image in an answer", "the model writes no images"),
}


def bad_row(case: str, red, broken) -> dict:
    odd = {"missing": "missing.jpg", "http": "https://example.com/a.png", "not base64": "data:image/png;base64,%%"}
    if case in broken:
        return asked("<image>What?", "Yes", broken[case])
    if case in odd:
        return asked("<image>What?", "Yes", odd[case])
    if case == "null":
        return {"images": [None], "conversations": asked("<image>What?", "Yes")["conversations"]}
    if case == "in the answer":
        return asked("What?", "<image>Yes", red)
    marks, images = {"two marks": (2, 1), "a mark too few": (1, 2), "no image": (1, 0)}[case]
    return asked("<image>" * marks + "What?", "Yes", *[red] * images)


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_cannot_be_shown_is_a_bad_row(case, prepared_for, pictures, broken):
    rows = [bad_row(case, pictures["red"], broken), asked("<image>What?", "Yes", pictures["red"])]
    reason, detail = BAD[case]
    prepared = prepared_for(FAMILY, rows)
    assert prepared.report.dropped == {reason: 1} and len(prepared.train) == 1
    assert "rows.json:1" in prepared.report.first_dropped[reason] and detail in prepared.report.first_dropped[reason]
    with pytest.raises(UserError, match=f"rows.json:1: {reason}"):
        prepared_for(FAMILY, rows, dataset={"on_bad_row": "error"})


def test_repairing_a_row_keeps_images_with_their_questions(prepared_for, pictures, tokenizer_of):
    row = asked("<image>What?", "", pictures["blue"], pictures["red"])
    row["conversations"] += [{"from": "human", "value": "And <image>?"}, {"from": "gpt", "value": "Yes"}]
    prepared = prepared_for(FAMILY, [row], dataset={"on_bad_row": "repair"})
    assert prepared.train[0].images == (str(pictures["red"]),)
    assert question_of(prepared, tokenizer_of(FAMILY)) == f"And {IMAGE}?"


def test_exif_rotation_and_transparency_are_undone(prepared_for, reader_of, tmp_path):
    from ligertune.vision.image_files import check_image, read_image

    lying = Image.new("RGB", (120, 60), "red")
    exif = lying.getexif()
    exif[0x0112] = 6  # a quarter turn
    lying.save(tmp_path / "lying.jpg", exif=exif)
    seen = check_image(tmp_path / "lying.jpg")
    assert (seen.width, seen.height) == (60, 120) == read_image(seen.path).size
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_image(str(tmp_path / "clear.png")).getpixel((0, 0)) == (255, 255, 255)
    Image.new("P", (8, 8)).save(tmp_path / "palette.png")
    assert read_image(str(tmp_path / "palette.png")).mode == "RGB"


def test_names_of_image_tokens_in_a_text_are_text(prepared_for, pictures, tokenizer_of, reader_of):
    row = asked(f"<image>What is {IMAGE}?", "Yes", pictures["red"])
    prepared = prepared_for(FAMILY, [row])
    ids, token_id = prepared.train[0].input_ids, reader_of(FAMILY).token_id
    assert int((ids == token_id).sum()) == 8  # 100 x 60 pixels: 4 x 2 tokens, and none for the name
    assert prepared.report.literal == 1


def test_truncation_cuts_no_image(prepared_for, pictures, tokenizer_of):
    row = asked("<image>What is this?", "Yes " * 40, pictures["red"])
    row["conversations"] += asked("<image>Who?", "a system", pictures["red"])["conversations"]
    row["images"] *= 2
    prepared = prepared_for(FAMILY, [row, asked("What?", "Yes")], max_length=100, on_overlength="truncate")
    assert prepared.report.dropped == {"cut through an image": 1}
    whole = prepared_for(FAMILY, [row], max_length=100_000).train[0]
    length = len(whole.input_ids) - 5
    assert len(prepared_for(FAMILY, [row], max_length=length, on_overlength="truncate").train[0].input_ids) == length


def test_everything_trained_is_all_but_images(prepared_for, pictures, reader_of):
    prepared = prepared_for(FAMILY, [asked("<image>What?", "Yes", pictures["red"])], train_on="all")
    example, reader = prepared.train[0], reader_of(FAMILY)
    untrained = set(example.input_ids[example.labels == -100].tolist()) - {int(example.input_ids[0])}
    assert untrained == set(reader.untrained) and len(reader.untrained) == 3


@pytest.mark.parametrize("bound, tokens", [(3136, 4), (28 * 28 * 8, 8), (1_003_520, 8)])
def test_pixel_limits_set_the_tokens_of_an_image(bound, tokens, folder_of, pictures):
    from ligertune.vision.image_files import check_image

    reader = tiny_vlms.reader_of(folder_of(FAMILY), image_max_pixels=bound)
    picture = check_image(pictures["red"])
    assert reader.tokens(picture) <= tokens
    assert len(reader.pixels(picture.path)["pixel_values"]) == 4 * reader.tokens(picture)


def test_a_lower_pixel_limit_enlarges(folder_of, pictures):
    from ligertune.vision.image_files import check_image

    reader = tiny_vlms.reader_of(folder_of(FAMILY), image_min_pixels=28 * 28 * 40)
    assert reader.tokens(check_image(pictures["red"])) >= 40


def test_the_limits_are_refused_where_nothing_reads_them(folder_of):
    with pytest.raises(UserError, match=r"vision.image_max_pixels: LLaVA resizes every image"):
        tiny_vlms.reader_of(folder_of("llava"), image_max_pixels=1000)


def test_a_text_model_still_refuses_images(prepared_for, pictures, tokenizer_of, tmp_path):
    from ligertune.data.prepare import prepare
    from ligertune.planning.options import DataOptions, DatasetOptions

    path = tmp_path / "rows.json"
    path.write_text(json.dumps([asked("<image>What?", "Yes", pictures["red"])]))
    data = DataOptions(datasets=[DatasetOptions(path=str(path))], cache=False)
    with pytest.raises(UserError, match="is no text"):
        prepare(data, tokenizer_of(FAMILY), seed=0)


def test_the_cache_keeps_images_and_notices_one_that_is_gone(reader_of, tokenizer_of, pictures, tmp_path):
    from ligertune.data.prepare import prepare
    from ligertune.planning.options import DataOptions, DatasetOptions

    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(pictures["red"].read_bytes())
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([asked("<image>What?", "Yes", "a.png"), asked("<image>Who?", "Yes", "b.png")]))

    def again():
        data = DataOptions(datasets=[DatasetOptions(path=str(path))], num_proc=1)
        return prepare(data, tokenizer_of(FAMILY), seed=0, images=reader_of(FAMILY))

    first, second = again(), again()
    assert second.report.sets[0].cached and second.train.fingerprint == first.train.fingerprint
    assert [example.images for example in second.train] == [example.images for example in first.train]
    (tmp_path / "b.png").unlink()
    with pytest.raises(UserError, match=r"b\.png: this image was there"):
        again()
