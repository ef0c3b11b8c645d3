"""`ligertune chat`, the pieces in which text is printed, and what a name on the command line means."""

import io
import json
import shutil
import sys

import pytest
import torch
from huggingface_hub import constants
from support.command_line import run_here
from transformers import AutoTokenizer

from ligertune.decode.chat import Chat
from ligertune.decode.generate import Decoding, TextPieces, encode_prompt, generate_answer, load_model
from ligertune.errors import UserError
from ligertune.models.save import write_prompt
from ligertune.planning.saved_model import check_can_generate, find_saved_model

SAMPLED = Decoding(40, temperature=1.5)  # at this temperature the tiny model writes bytes of characters, too


@pytest.fixture
def folder(quickstart, tmp_path):
    """folder(template): the folder of a run whose model was trained with this prompt template."""

    def copy(template: str):
        model = tmp_path / "runs" / template / "model"
        shutil.copytree(quickstart / "stories260K", model)
        write_prompt(model, {"prompt_template": template, "system_prompt": None})
        return model.parent

    return copy


@pytest.fixture
def talk(monkeypatch, tmp_path):
    """talk(lines, *arguments): `ligertune chat` with these lines in its pipe."""

    def call(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        return run_here("chat", *arguments, "--max-new-tokens", 8, cwd=tmp_path)

    return call


def test_pieces_join_to_the_text_and_end_between_characters(quickstart):
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    ids = tokenizer("Once\n one 日本 🎈 day", add_special_tokens=False)["input_ids"]
    found = []
    pieces = TextPieces(tokenizer, found.append)
    pieces.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in ids[:-1]:
        pieces.put(torch.tensor([token]))
    assert "�" not in "".join(found) and len(found) > 5
    pieces.put(torch.tensor([ids[-1]]))
    pieces.end()
    assert "".join(found) == pieces.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_streamed_pieces_are_the_text_of_generate(folder):
    loaded, found = load_model(str(folder("chat") / "model"), raw=False), []
    answer = generate_answer(loaded, "Tell me a story.", SAMPLED, seed=3, on_text=found.append)
    assert len(found) > 5 and "".join(found) == answer.text
    assert answer.text == generate_answer(loaded, "Tell me a story.", SAMPLED, seed=3).text


def test_chat_reads_a_pipe_and_starts_as_generate_does(folder, talk, tmp_path):
    for template, says in (("chat", ""), ("alpaca", "single exchanges"), ("raw", "Plain text without a chat template")):
        run = folder(template)
        done = talk(["Say hi.", "", "/help", "/nothing", "/reset", "Say hi.", "/exit", "Not read."], run)
        assert done.code == 0, done.err
        once = run_here("generate", run, "Say hi.", "--max-new-tokens", 8, cwd=tmp_path).out
        assert once.strip() and done.out == once * 2
        assert says in done.err and "/system TEXT" in done.err and "There is no command /nothing." in done.err


def test_a_turn_is_prompted_with_the_turns_before_it(folder):
    loaded = load_model(str(folder("chat") / "model"), raw=False)
    chat, said = Chat(loaded, Decoding(8), lambda piece: None, lambda notice: None), []
    chat.set_system("Be brief.")
    said = [chat.ask("Say hi."), chat.ask("Again.")]
    prompt = f"### system:\nBe brief.\n\n### user:\nSay hi.\n\n### assistant:\n{said[0]}</s>\n\n### user:\nAgain."
    ids = loaded.tokenizer(f"<s>{prompt}\n\n### assistant:\n", add_special_tokens=False, return_tensors="pt")
    expected = loaded.model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert said[1] == loaded.tokenizer.decode(expected, skip_special_tokens=True)


def test_generate_puts_a_system_prompt_where_chat_does(folder, tmp_path):
    run = folder("chat")
    done = run_here("generate", run, "Say hi.", "--system", "Be brief.", "--max-new-tokens", 1, "--json", cwd=tmp_path)
    assert json.loads(done.out)["prompt"] == ("<s>### system:\nBe brief.\n\n### user:\nSay hi.\n\n### assistant:\n")
    refused = run_here("generate", folder("raw"), "Say hi.", "--system", "Be brief.", cwd=tmp_path)
    assert refused.code == 2 and "prompted without a chat template" in refused.err


def test_the_oldest_turns_leave_a_full_context(folder):
    loaded, notices = load_model(str(folder("alpaca") / "model"), raw=False), []
    chat = Chat(loaded, Decoding(16), lambda piece: None, notices.append)
    assert chat.context == 512
    for number in range(8):
        chat.ask(f"Question {number}: " + "word " * 30)
    kept = [asked[:10] for asked, _ in chat.history]
    assert kept == [f"Question {number}" for number in range(8 - len(kept), 8)] and 1 < len(kept) < 5
    assert any("context of 512 tokens is full: dropped the first turn." in notice for notice in notices)
    with pytest.raises(UserError, match="the model's context is 512"):
        chat.ask("word " * 600)
    assert chat.ask("Short.")


def test_a_prompt_leaves_room_for_an_answer_within_the_context(folder):
    """The model reads and writes 512 tokens together; a quarter of them at most is kept free for an answer."""
    loaded, written = load_model(str(folder("alpaca") / "model"), raw=False), []
    chat = Chat(loaded, Decoding(300), lambda piece: None, lambda notice: None)
    chat.history = [(f"Question {number}: " + "word " * 20, "An answer.") for number in range(12)]

    def prompt() -> int:
        return len(encode_prompt(loaded.tokenizer, "Short.", loaded.template, chat.history)[1])

    assert prompt() > 512
    chat.ask("Short.")
    *kept, (_, answer) = chat.history
    written = len(loaded.tokenizer(answer, add_special_tokens=False)["input_ids"])
    chat.history = kept
    assert prompt() + 128 <= 512 and prompt() + written <= 512 + 2  # decoding and encoding may differ by a token
    chat.history = []
    filling = next(text for n in range(1, 600) if _length(loaded, text := "x " * n) == 512)
    with pytest.raises(UserError, match="has 512 tokens with its prompt, and the model's context is 512"):
        chat.ask(filling)


def _length(loaded, message: str) -> int:
    return len(encode_prompt(loaded.tokenizer, message, loaded.template, [])[1])


def test_ctrl_c_keeps_what_was_written(folder):
    found = []

    def interrupt(piece: str) -> None:
        found.append(piece)
        if len(found) == 3:
            raise KeyboardInterrupt

    chat = Chat(load_model(str(folder("chat") / "model"), raw=False), Decoding(50), interrupt, lambda notice: None)
    answer = chat.ask("Tell me a story.")
    assert found == [*found[:3], "\n"] and answer == "".join(found[:3])
    assert [asked for asked, _ in chat.history] == ["Tell me a story."]


def test_a_name_means_a_run_a_model_a_checkpoint_or_a_hub_id(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = folder("chat")
    (run / "plan.json").write_text("{}")
    for name in (str(run), "runs/chat", "runs/chat/", "runs/chat/model"):
        found = find_saved_model(name, key="MODEL")
        assert (tmp_path / found.name).samefile(run / "model") and found.run.samefile(run)
    assert find_saved_model("Qwen/Qwen2.5-0.5B", key="MODEL").name == "Qwen/Qwen2.5-0.5B"
    shutil.rmtree(run / "model")
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    (run / "checkpoints" / "step-3" / "progress.json").write_text("{}")
    checkpoint = find_saved_model("runs/chat/checkpoints/step-3", key="MODEL")
    assert checkpoint.is_checkpoint and checkpoint.run.samefile(run)
    with pytest.raises(UserError, match="ligertune export runs/chat/checkpoints/step-3 --out step-3"):
        check_can_generate(checkpoint, key="MODEL")
    with pytest.raises(UserError, match="ligertune export runs/chat --checkpoint newest"):
        find_saved_model("runs/chat", key="MODEL")
    for missing in ("runs/none", "./none", "none/", "a/b/c", "~/none-at-all", str(tmp_path / "none")):
        with pytest.raises(UserError, match=f"there is no folder {missing}"):
            find_saved_model(missing, key="MODEL")


def test_an_uploaded_model_keeps_its_prompt_format(folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--me--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(folder("alpaca") / "model", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    for name, value in {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": True}.items():
        monkeypatch.setattr(constants, name, value)
    done = run_here("generate", "me/tiny", "Say hi.", "--max-new-tokens", 2, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "### Instruction:\nSay hi." in json.loads(done.out)["prompt"]
    refused = run_here("generate", "me/other", "Say hi.", cwd=tmp_path)
    assert refused.code == 2 and "me/other is not a folder here, and the hub could not be reached" in refused.err


def test_several_prompts_are_answered_in_one_load(folder, tmp_path):
    (tmp_path / "p.txt").write_text('Say hi.\n{"prompt": "Say\\nhello."}\n\n')
    done = run_here("generate", folder("chat"), "--prompts", "p.txt", "--max-new-tokens", 4, cwd=tmp_path)
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if line.startswith("---")] == [
        "--- 1: Say hi. ---",
        "--- 2: Say ---",
    ]
    refused = run_here("generate", "runs/chat", "--prompts", "p.txt", "--image", "a.png", cwd=tmp_path)
    assert refused.code == 2 and "is a text model" in refused.err
    (tmp_path / "p.txt").write_text("{}\n")
    refused = run_here("generate", "runs/chat", "--prompts", "p.txt", cwd=tmp_path)
    assert refused.code == 2 and 'p.txt:1: expected {"prompt"' in refused.err
