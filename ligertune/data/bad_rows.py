"""Rows that cannot be used: the reasons for which they are dropped, and the repairs of `on_bad_row: repair`."""

from __future__ import annotations

DROP_REASONS: dict[str, str] = {
    "too large": "the record has more bytes than data.max_record_bytes",
    "missing value": "a column or a field that the format needs is absent or null",
    "not text": "a value that must be text is a number, a list, an image, ...",
    "not a list of turns": "the conversation is not a list of objects with a role and a text",
    "unknown role": "the role of a turn is not system, user, assistant, tool or another known name of these",
    "roles out of order": "a system turn after the first, an answer to nothing, two turns of one role in a row",
    "parent is missing": "the message of a tree answers one that does not come before it in the tree's rows",
    "no answer": "there is no turn of the assistant",
    "last turn is not an answer": "the conversation breaks off: the turns after its last answer would not be trained",
    "empty prompt": "a user turn without text, often a lost attachment: its answer answers nothing",
    "empty answer": "no text, no reasoning and no call: it would train the model to stop at once",
    "call is not JSON": "a tool call that is not an object with a name and arguments",
    "tools are not JSON": "the list of tools cannot be read",
    "chat_template_kwargs are wrong": "the column is not an object of variables, or sets what ligertune sets itself",
    "nested too deeply": "lists or objects within each other, hundreds of levels deep",
    "broken text": "half of a surrogate pair, which is no character and has no UTF-8",
    "control token in the text": "the tokenizer turns this text into a control token even with special tokens split",
    "the template refuses it": "the chat template raises an error for this conversation",
    "the template leaves a turn out": "the rendered text lacks a system or tool turn",
    "the answer cannot be placed": "the rendered text does not contain the answer exactly once",
    "several exchanges": "it holds more than one question and one answer, which needs prompt_template: chat",
    "image is missing": "there is no such file next to the data file, or in data.image_dir",
    "image cannot be read": "the file is cut off, broken, not an image, or far too narrow",
    "image on the network": "only files, data URLs and data sets with images in them are read",
    "image marks do not fit": "the number of marks in the text (<image>, or parts of type image) is not that of images",
    "image in an answer": "the model writes text only",
    "the template leaves an image out": "the rendered text does not contain each image once",
    "cut through an image": "data.max_length ends before the last image does, with on_overlength: truncate",
    "no text": "the row is empty: there is nothing to learn",
    "equal answers": "the chosen and the rejected answer are the same, so neither can be preferred",
    "equal scores": "the scores of the chosen and the rejected answer are equal: neither is preferred",
    "no label": "the label is null or empty; labels of answers must be 1 or 0, true or false",
    "label of another kind": "the label is negative, not finite, or of another kind than most first rows have",
    "label is too large": "ids must be below 1,048,576, lists have at most as many labels, and numbers be at most 1e18",
    "margin is not a number": "the column `margin` of a pair must hold a number",
    "no trained token": "its answers have weight 0, the tokenizer merged them into the prompt, or all labels are -100",
    "too long": "more than data.max_length tokens, with data.on_overlength: drop",
    "cut before the answer": "no trained token is left within data.max_length, with on_overlength: truncate",
}
# reasons that data.on_overlength decides on, not on_bad_row
LENGTH_REASONS = ("too long", "cut before the answer", "cut through an image")

# reasons that `on_bad_row: repair` fixes in most rows
REPAIRED_REASONS = (
    "not text", "roles out of order", "last turn is not an answer", "empty prompt", "empty answer",
)  # fmt: skip
# reasons that most often are a wrong column or format
COLUMN_REASONS = ("missing value", "not text", "not a list of turns", "no answer", "no text")


class BadRow(Exception):
    """A row that cannot be used. `reason` is a key of DROP_REASONS, `detail` what was found.

    `data.datasets[].on_bad_row` decides whether the row is dropped or the run stops.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in DROP_REASONS:
            raise ValueError(f"not a key of DROP_REASONS: {reason!r}")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
