"""`ligertune generate`, `chat` and `serve`: answer prompts, talk with a model, or let a client do so."""

from __future__ import annotations

import contextlib
import json as json_library
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligertune.cli.options import GenerateRequest, Json, TrustRemoteCode, answers_of_decoder, with_decoders
from ligertune.cli.render import console as render
from ligertune.errors import UserError
from ligertune.launcher.signals import before_leaving
from ligertune.progress import importing

if TYPE_CHECKING:
    from ligertune.decode.chat import Chat
    from ligertune.decode.generate import GeneratedText, LoadedModel

Model = Annotated[
    str, typer.Argument(help="Folder of a run, a model or an adapter, or a hub id of a model.", show_default=False)
]
System = Annotated[
    str | None,
    typer.Option("--system", help="System prompt. Default: data.system_prompt of training.", show_default=False),
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a prompt template.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: keep this probability mass.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=2**20, help="Maximum number of new tokens of an answer.")]
# torch's generators take seeds of 64 bits
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed for sampling.")]


@with_decoders
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='File of prompts, one per line: text, or {"prompt": ...}.', show_default=False),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", help="Image file for a vision-language model. May be repeated.", show_default=False),
    ] = None,
    system: System = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 42,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    **decoders: Any,
) -> None:
    """Answer or continue a prompt, using the prompt template that the model was trained with.

    Example: ligertune generate runs/quickstart 'Name three colours.'

    With an image: ligertune generate runs/qwen2-vl 'What is this?' --image photo.jpg
    """
    asked = _questions(prompt, prompts)
    render.people_on_stderr(json)
    request = GenerateRequest(
        model=model,
        prompts=asked,
        system=system,
        raw=raw,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        trust_remote_code=trust_remote_code,
        prompts_file=prompts,
        images=tuple(image or ()),
    )
    answers = answers_of_decoder(request, decoders)
    if answers is not None:
        _print_decoded(answers, request, json)
        return
    _answer_prompts(request, json)


def _print_decoded(answers: Iterable[GeneratedText], request: GenerateRequest, json: bool) -> None:
    """Print the answers of a feature's decoder as they are made, and how fast each was."""
    made = []
    for number, answer in enumerate(answers):
        made.append(answer)
        if not json:
            if request.prompts_file:
                _print_number(number, request)
            render.document(answer.text)
        render.note(answer.speed)
    if json:
        _print_json(made, as_list=request.prompts_file is not None)


def _questions(prompt: str | None, prompts: Path | None) -> list[str]:
    """Return the prompts to answer. Raises UserError unless there is either one prompt or a file of them."""
    if prompts is not None and prompt is None:
        return read_prompts(prompts)
    if prompt is not None and prompts is None:
        return [_read_stdin() if prompt == "-" else prompt]
    raise UserError("generate takes one prompt or --prompts FILE.", hint="Write the prompt after the model.")


def _answer_prompts(request: GenerateRequest, json: bool) -> None:
    """Answer all prompts with one loaded model, and print each answer as it is made."""
    loaded = _load(request.model, raw=request.raw, trust_remote_code=request.trust_remote_code)
    if request.system is not None:
        loaded = loaded.with_system(request.system)
    from ligertune.decode.sampling import sampling_notes

    answers = []
    line_end = contextlib.nullcontext() if json else before_leaving(partial(os.write, 1, b"\n"))  # of a line cut off
    with sampling_notes() as notes, line_end:
        for answer in _answers_of(loaded, request, json):
            answers.append(answer)
            if not json and not answer.text.endswith("\n"):
                render.piece("\n")
    if json:
        _print_json(answers, as_list=request.prompts_file is not None)
    for note in notes:
        render.note(note)


def _answers_of(loaded: LoadedModel, request: GenerateRequest, json: bool) -> Iterator[GeneratedText]:
    """Yield the answers in the order of their prompts, and print their text. Images are answered one by one."""
    from ligertune.decode.generate import Decoding, generate_answer, generate_answers

    decoding = Decoding(request.max_new_tokens, request.temperature, request.top_p)
    if request.prompts_file and loaded.reader is None and not request.images:
        answers = generate_answers(loaded, request.prompts, decoding, seed=request.seed)
        for number, answer in enumerate(answers):
            if not json:
                _print_number(number, request)
                render.piece(answer.text)
            yield answer
        return
    for number, text in enumerate(request.prompts):
        if request.prompts_file and not json:
            _print_number(number, request)
        yield generate_answer(
            loaded,
            text,
            decoding,
            images=list(request.images),
            seed=request.seed,
            on_text=None if json else render.piece,
        )


def _print_number(place: int, request: GenerateRequest) -> None:
    """Print the line above an answer to one of many prompts."""
    render.document(f"--- {place + 1}: {request.prompts[place].strip().splitlines()[0]} ---")


def chat(
    model: Model,
    system: System = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 42,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk with a model, in the prompt template that it was trained with. From a pipe: one message per line.

    Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, leaves. /help lists the commands.

    Example: ligertune chat runs/quickstart --temperature 0.7
    """
    loaded = _load(model, raw=raw, trust_remote_code=trust_remote_code)
    import torch

    from ligertune.decode.chat import Chat
    from ligertune.decode.generate import Decoding
    from ligertune.decode.sampling import sampling_notes

    decoding = Decoding(max_new_tokens, temperature, top_p)
    conversation = Chat(loaded, decoding, on_text=render.piece, on_notice=render.note)
    if system is not None:
        conversation.set_system(system)
    torch.manual_seed(seed)
    if conversation.format_note:
        render.note(conversation.format_note)
    for message in _messages():
        word, _, rest = message.partition(" ")
        if word == "/exit":
            break
        try:
            if re.fullmatch(r"/\w+", word):
                _run_command(conversation, word, rest.strip())
            else:
                with sampling_notes() as notes, _ctrl_c_raises():  # it ends the answer, not the conversation
                    conversation.ask(message)
                for note in notes:
                    render.note(note)
        except UserError as problem:  # the message is refused, and the conversation goes on
            render.error(problem)


def serve(
    model: Model,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. The default is reached from this machine only.")] = (
        "127.0.0.1"
    ),
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Answer requests of OpenAI's clients, one at a time, in the prompt template that the model was trained with.

    To try a run in a client; for many users export it, and serve it with vLLM. Options hold where a request says
    nothing. --json prints the address and the model's name at the start. Ctrl-C ends it.

    Example: ligertune serve runs/quickstart --port 8000
    """
    render.people_on_stderr(json)
    with importing():
        from ligertune.serving.openai_server import ServedRun, is_loopback, listen
    server = listen(host, port)  # before the model is loaded, which takes minutes
    loaded = _load(model, raw=False, trust_remote_code=trust_remote_code)
    from ligertune.decode.generate import Decoding

    if loaded.reader is not None:
        raise UserError(f"MODEL: {loaded.name} reads images, which are not served.", hint="Use ligertune generate.")
    name = Path(model).resolve().name if Path(model).exists() else model
    server.served = ServedRun(name, loaded, Decoding(max_new_tokens, temperature, top_p), render.note)
    if not is_loopback(host):
        render.note(f"{host} is reached from other machines, and nothing asks for a password.")
    render.text(f"serving {name} at {server.address}; Ctrl-C ends it")
    if json:
        render.json_report({"address": server.address, "model": name})
    server.serve_forever()


@contextlib.contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt inside, and end the process outside."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


COMMANDS = "/reset forgets the conversation, /system TEXT replaces the system prompt, /exit leaves, /help shows this."


def _run_command(conversation: Chat, word: str, rest: str) -> None:
    if word == "/reset":
        conversation.history.clear()
        render.note("The conversation is empty.")
    elif word == "/system":
        conversation.set_system(rest)
        render.note("System prompt set." if rest else "System prompt removed.")
    else:
        render.note(COMMANDS if word == "/help" else f"There is no command {word}. {COMMANDS}")


def _messages() -> Iterator[str]:
    """Yield the lines that a person types or that a pipe holds, without empty ones."""
    if not sys.stdin.isatty():
        with _utf8_stdin():
            yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with contextlib.suppress(ImportError):  # `input` edits lines and remembers them with it; Windows has none
        import readline  # noqa: F401
    render.note(f"Ctrl-C stops an answer, Ctrl-D leaves. {COMMANDS}")
    while True:
        try:
            with _ctrl_c_raises():
                line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            render.piece("\n")
            return
        if line:
            yield line


def _read_stdin() -> str:
    with _utf8_stdin():
        return sys.stdin.read()


@contextlib.contextmanager
def _utf8_stdin() -> Iterator[None]:
    """Turn bytes of stdin that are not UTF-8 into a UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"stdin is not UTF-8: byte 0x{error.object[error.start]:02x}.", hint="Convert it, for example with iconv."
        ) from error


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one per line, as text or as a JSON object with `prompt`. Raises UserError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        raise UserError(f"--prompts: {path} cannot be read: {reason}.", hint="Name a text file.") from problem
    found = []
    for number, line in enumerate(lines, start=1):
        prompt: Any = line
        if line.startswith("{"):
            try:
                prompt = json_library.loads(line)["prompt"]
            except (ValueError, KeyError):
                prompt = None
        if not isinstance(prompt, str):
            raise UserError(f'{path}:{number}: expected {{"prompt": "..."}} or plain text.')
        if prompt.strip():
            found.append(prompt)
    if not found:
        raise UserError(f"--prompts: {path} holds no prompts.", hint="Write one per line.")
    return found


def _load(model: str, *, raw: bool, trust_remote_code: bool) -> LoadedModel:
    """Load MODEL once. A path that leads nowhere is refused before torch is imported, which takes seconds."""
    from ligertune.planning.saved_model import check_can_generate, find_saved_model

    saved = find_saved_model(model, key="MODEL")
    check_can_generate(saved, key="MODEL")
    with render.status("loading the model ..."):
        with importing():
            from ligertune.decode.generate import load_model

        loaded = load_model(saved.name, raw=raw, trust_remote_code=trust_remote_code)
    render.hub_notes()
    return loaded


def _print_json(answers: list[GeneratedText], *, as_list: bool) -> None:
    from dataclasses import asdict

    found = [asdict(answer) for answer in answers]
    render.json_report(found if as_list else found[0])
