"""Rows with images: every dataset format, and bad rows with their reasons."""

import base64
import io
import json

import datasets
import pytest
from PIL import Image
from support.data.image_batches import image_row
from support.models import tiny_vlms

from ligertune.data.modalities.image.image_files import check_image, read_image
from ligertune.data.rows.sources import without_decoding
from ligertune.errors import UserError

FAMILY = "qwen2_vl"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def question_of(prepared, tokenizer, index: int = 0) -> str:
    """Return the user's turn of an example, with one token per image."""
    ids = prepared.train[index].input_ids.tolist()
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    text = tokenizer.decode([t for i, t in enumerate(ids) if t != pad or ids[i - 1] != pad])
    return text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]


REFERENCES = {
    "path": str,
    "file url": lambda path: f"file://{path}",
    "data url": lambda path: f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}",
}
ANSWER = {"role": "assistant", "content": "Yes"}
TURNS = [{"role": "user", "content": "What is<image>this?"}, ANSWER]
LLAVA_TURNS = [{"from": "human", "value": "What is<image>this?"}, {"from": "gpt", "value": "Yes"}]


def with_part(**part: object) -> list[dict]:
    """Return the messages with the image as a content part."""
    content = [{"type": "text", "text": "What is"}, part, {"type": "text", "text": "this?"}]
    return [{"role": "user", "content": content}, ANSWER]


FORMATS = {
    "llava": lambda red: {"image": red, "conversations": LLAVA_TURNS},
    "sharegpt": lambda red: {"images": [red], "conversations": LLAVA_TURNS},
    "messages": lambda red: {"images": [red], "messages": TURNS},
    "parts filled from the column": lambda red: {"images": [red], "messages": with_part(type="image")},
    "parts with images": lambda red: {"messages": with_part(type="image", image=red)},
    "openai": lambda red: {"messages": with_part(type="image_url", image_url={"url": red})},
    "alpaca": lambda red: {"images": [red], "instruction": "What is<image>this?", "output": "Yes"},
    "prompt_completion": lambda red: {"image": red, "prompt": TURNS[:1], "completion": TURNS[1:]},
    "query and response": lambda red: {"image": red, "query": "What is<image>this?", "response": "Yes"},
}


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("form", FORMATS)
def test_all_formats_give_the_same_example(form, reference, prepared_for, image_paths, tokenizer_of):
    red = image_paths["red"]
    prepared = prepared_for(FAMILY, [FORMATS[form](REFERENCES[reference](red))], prompt_template="chat")
    example, tokenizer = prepared.train[0], tokenizer_of(FAMILY)
    assert question_of(prepared, tokenizer) == f"What is{IMAGE}this?"
    assert tokenizer.decode(example.labels[example.labels != -100]) == "Yes<|im_end|>"
    assert [read_image(path).tobytes() for path in example.media] == [read_image(str(red)).tobytes()]


def test_parquet_files_of_hub_datasets_contain_their_images(prepared_for, image_paths, tmp_path):
    rows = {"image": [str(image_paths["red"]), str(image_paths["blue"])], "prompt": ["What is <image>"] * 2,
            "completion": ["red", "blue"]}  # fmt: skip
    rows = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    rows.to_parquet(tmp_path / "rows.parquet")
    prepared = prepared_for(FAMILY, tmp_path / "rows.parquet", prompt_template="chat")
    for example, colour in zip(prepared.train, ("red", "blue"), strict=True):
        assert Image.open(example.media[0]).getpixel((0, 0)) == Image.open(image_paths[colour]).getpixel((0, 0))


@pytest.mark.parametrize("streaming", [False, True])
def test_image_columns_of_hub_datasets_are_not_decoded(streaming, image_paths):
    paths = [str(image_paths["red"]), str(image_paths["blue"])]
    rows = datasets.Dataset.from_dict({"image": paths, "images": [paths, paths[:1]]})
    rows = rows.cast_column("image", datasets.Image()).cast_column("images", datasets.Sequence(datasets.Image()))
    found = list(without_decoding(rows.to_iterable_dataset() if streaming else rows))
    assert [row["image"]["path"] for row in found] == paths
    assert [len(row["images"]) for row in found] == [2, 1] and set(found[0]["images"][1]) == {"bytes", "path"}


def test_images_keep_their_order(prepared_for, image_paths, tokenizer_of):
    colours = ("green", "red", "green")
    row = image_row("<image>\n<image> and\n<image>", "a system", *(image_paths[c] for c in colours))
    prepared = prepared_for(FAMILY, [row])
    assert question_of(prepared, tokenizer_of(FAMILY)) == f"{IMAGE}{IMAGE} and{IMAGE}"
    assert list(prepared.train[0].media) == [str(image_paths[c]) for c in colours]
    # images without marks come before the first question
    prepared = prepared_for(FAMILY, [image_row("What is this?", "Yes", image_paths["red"], image_paths["blue"])])
    assert question_of(prepared, tokenizer_of(FAMILY)) == f"{IMAGE}{IMAGE}What is this?"


def test_another_image_processor_needs_another_cache_entry(prepared_for, image_paths, reader_of, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGERTUNE_CACHE", str(tmp_path / "cache"))
    rows = [image_row("<image>?", "Yes", image_paths["red"])]
    assert [prepared_for(FAMILY, rows, cache=True).report.sets[0].cached for _ in range(2)] == [False, True]
    monkeypatch.setattr(type(reader_of(FAMILY)), "identity", lambda reader: {})
    assert not prepared_for(FAMILY, rows, cache=True).report.sets[0].cached


def test_relative_paths_start_from_the_data_or_from_image_dir(prepared_for, image_paths, tmp_path):
    row = image_row("<image>What?", "Yes", "red.png")
    with pytest.raises(UserError, match=r"image is missing.*red\.png"):
        prepared_for(FAMILY, [row])
    found = prepared_for(FAMILY, [row], image_dir=str(image_paths["red"].parent)).train[0].media
    assert found == (str(image_paths["red"]),)
    (tmp_path / "red.png").write_bytes(image_paths["red"].read_bytes())
    assert prepared_for(FAMILY, [row]).train[0].media == (str(tmp_path / "red.png"),)


# case -> (question, answer, images, reason, detail); the files are those of `broken_files`
BAD = {
    "truncated": ("<image>What?", "Yes", ["truncated.jpg"], "image cannot be read", "truncated.jpg"),
    "not an image": ("<image>What?", "Yes", ["text.jpg"], "image cannot be read", "text.jpg"),
    "empty": ("<image>What?", "Yes", ["empty.jpg"], "image cannot be read", "empty.jpg"),
    "too narrow": ("<image>What?", "Yes", ["narrow.png"], "image cannot be read", "1000 x 4 is too narrow"),
    "missing": ("<image>What?", "Yes", ["missing.jpg"], "image is missing", "missing.jpg"),
    "http": ("<image>What?", "Yes", ["https://example.com/a.png"], "image on the network", "https://example.com/a.png"),
    "not base64": ("<image>What?", "Yes", ["data:image/png;base64,%%"], "image cannot be read", "a data URL"),
    "null": ("<image>What?", "Yes", [None], "image cannot be read", "None is neither"),
    "two marks": ("<image><image>What?", "Yes", ["red.png"], "image marks do not fit", "2 marks for 1 images"),
    "too few marks": ("<image>What?", "Yes", ["red.png"] * 2, "image marks do not fit", "1 marks for 2 images"),
    "no image": ("<image>What?", "Yes", [], "image marks do not fit", "1 marks for 0 images"),
    "in the answer": ("What?", "<image>Yes", ["red.png"], "image in an answer", "the model writes no images"),
}


@pytest.fixture
def broken_files(image_paths, tmp_path):
    noise = io.BytesIO()
    Image.effect_noise((200, 200), 80).convert("RGB").save(noise, "JPEG")
    (tmp_path / "truncated.jpg").write_bytes(noise.getvalue()[: len(noise.getvalue()) // 2])
    (tmp_path / "text.jpg").write_bytes(b"hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "red.png").write_bytes(image_paths["red"].read_bytes())
    Image.new("RGB", (1000, 4)).save(tmp_path / "narrow.png")


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_dropped_with_a_reason_or_refused(case, prepared_for, image_paths, broken_files):
    question, answer, images, reason, detail = BAD[case]
    bad = {**image_row(question, answer), "images": images}
    rows = [bad, image_row("<image>What?", "Yes", image_paths["red"])]
    prepared = prepared_for(FAMILY, rows)
    assert prepared.report.dropped == {reason: 1} and len(prepared.train) == 1
    assert "rows.json:1" in prepared.report.first_dropped[reason] and detail in prepared.report.first_dropped[reason]
    with pytest.raises(UserError, match=f"rows.json:1: {reason}"):
        prepared_for(FAMILY, rows, dataset={"on_bad_row": "error"})


def test_a_repaired_row_keeps_images_with_their_questions(prepared_for, image_paths, tokenizer_of):
    row = image_row("<image>What?", "", image_paths["blue"], image_paths["red"])
    row["conversations"] += image_row("And <image>?", "Yes")["conversations"]
    prepared = prepared_for(FAMILY, [row], dataset={"on_bad_row": "repair"})
    assert prepared.train[0].media == (str(image_paths["red"]),)
    assert question_of(prepared, tokenizer_of(FAMILY)) == f"And {IMAGE}?"


def test_exif_orientation_and_transparency_are_applied(tmp_path):
    image = Image.new("RGB", (120, 60), "red")
    exif = image.getexif()
    exif[0x0112] = 5  # a mirrored quarter turn, the first of those that swap width and height
    image.save(tmp_path / "turned.jpg", exif=exif)
    found = check_image(tmp_path / "turned.jpg")
    assert (found.width, found.height) == (60, 120) == read_image(found.path).size
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "transparent.png")
    assert read_image(str(tmp_path / "transparent.png")).getpixel((0, 0)) == (255, 255, 255)
    Image.new("P", (8, 8)).save(tmp_path / "palette.png", transparency=0)
    assert read_image(str(tmp_path / "palette.png")).getpixel((0, 0)) == (255, 255, 255)


def test_names_of_image_tokens_in_user_text_are_plain_text(prepared_for, image_paths, reader_of):
    prepared = prepared_for(FAMILY, [image_row(f"<image>What is {IMAGE}?", "Yes", image_paths["red"])])
    n_image_tokens = int((prepared.train[0].input_ids == reader_of(FAMILY).token_id).sum())
    assert n_image_tokens == 8 and prepared.report.literal == 1  # 100 x 60 pixels: 4 x 2 tokens, none for the name


def test_truncation_never_cuts_an_image(prepared_for, image_paths):
    row = image_row("<image>What is this?", "Yes " * 40, image_paths["red"])
    row["conversations"] += image_row("<image>Who?", "a system")["conversations"]
    row["images"] *= 2
    prepared = prepared_for(FAMILY, [row, image_row("What?", "Yes")], max_length=100, on_overlength="truncate")
    assert prepared.report.dropped == {"cut through an image": 1}
    length = len(prepared_for(FAMILY, [row], max_length=100_000).train[0].input_ids) - 5
    assert len(prepared_for(FAMILY, [row], max_length=length, on_overlength="truncate").train[0].input_ids) == length


def test_train_on_all_excludes_image_tokens(prepared_for, image_paths, reader_of):
    prepared = prepared_for(FAMILY, [image_row("<image>What?", "Yes", image_paths["red"])], train_on="all")
    example, reader = prepared.train[0], reader_of(FAMILY)
    untrained = set(example.input_ids[example.labels == -100].tolist()) - {int(example.input_ids[0])}
    assert untrained == set(reader.untrained) and len(reader.untrained) == 3


def test_labels_of_a_question_exclude_its_image(prepared_for, image_paths, reader_of, tokenizer_of):
    rows = [image_row("<image>What?", "Yes", image_paths["red"])]
    example = prepared_for(FAMILY, rows, roles_to_train=["user"], train_on_eos="none").train[0]
    trained = example.labels[example.labels != -100].tolist()
    assert tokenizer_of(FAMILY).decode(trained).strip() == "What?"
    assert not set(trained) & set(reader_of(FAMILY).untrained)


def test_rows_of_token_ids_are_refused(prepared_for):
    with pytest.raises(UserError, match=r"its rows are token ids, with which a .* is not trained"):
        prepared_for(FAMILY, [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])


def test_a_saved_processor_has_the_pixel_limits_of_training(folder_of, tmp_path):
    reader = tiny_vlms.reader_of(folder_of(FAMILY), image_max_pixels=3136)
    reader.save(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["size"] == reader.options["size"] and saved["size"]["longest_edge"] == 3136


def test_pixel_limits_set_the_tokens_of_an_image(folder_of, image_paths):
    image = check_image(image_paths["red"])
    for limit, tokens in ((3136, 4), (28 * 28 * 8, 8), (1_003_520, 8)):
        reader = tiny_vlms.reader_of(folder_of(FAMILY), image_max_pixels=limit)
        assert reader.tokens(image) <= tokens
        assert len(reader.read(image.path)["pixel_values"]) == 4 * reader.tokens(image)
        assert reader.identity()["options"]["size"]["longest_edge"] == limit  # cached rows depend on it
    assert tiny_vlms.reader_of(folder_of(FAMILY), image_min_pixels=28 * 28 * 40).tokens(image) >= 40
    with pytest.raises(UserError, match=r"vision.image_max_pixels: LLaVA resizes every image"):
        tiny_vlms.reader_of(folder_of("llava"), image_max_pixels=1000)


def test_a_text_model_refuses_images(image_paths, prepared_for):
    with pytest.raises(UserError, match="is not text"):
        prepared_for(FAMILY, [image_row("<image>What?", "Yes", image_paths["red"])], has_reader=False)


def test_cached_data_keep_images_and_notice_a_missing_one(prepared_for, image_paths, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(image_paths["red"].read_bytes())
    rows = [image_row("<image>What?", "Yes", "a.png"), image_row("<image>Who?", "Yes", "b.png")]
    first, second = (prepared_for(FAMILY, rows, cache=True) for _ in range(2))
    assert second.report.sets[0].cached and second.train.fingerprint == first.train.fingerprint
    assert [example.media for example in second.train] == [example.media for example in first.train]
    (tmp_path / "b.png").unlink()
    with pytest.raises(UserError, match=r"b\.png: this image existed"):
        prepared_for(FAMILY, rows, cache=True)
