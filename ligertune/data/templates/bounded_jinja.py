"""Chat templates rendered as transformers does, with limits on time, size and recursion.

transformers renders them in a sandbox of jinja2, without access to files or to Python's objects, but nothing keeps them
from running for ever or from filling the memory. This environment is transformers' own, with the limits of
template_limits.py. They need no signals and no processes, so they hold in threads and in worker processes. A signal
is too late: `{{ '%0999999999d' % 1 }}` in transformers 5.24 answered a SIGALRM after 20 s only at its end, after 43 s.
A usual rendering takes 126 µs, and 151 µs there.

Also the files of templates: the built-in ones in `chat/`, those that a recipe names, and a tokenizer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template

from ligertune.data.templates.template_limits import (
    LONG,
    MAX_ADDED,
    TemplateLimitError,
    add,
    budget,
    check_filter,
    check_method,
    check_product,
    longest_text,
)
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_SOURCE = 2**17  # characters of a template; the longest in use have 30,000
_CONSTANTS = 2**20  # characters of expressions that jinja2 evaluates while it compiles
# filters and functions that chat templates do not use, and whose time or result is not easily bounded
_LEFT_OUT = ("lipsum", "urlize", "wordwrap", "pprint")
_PIECES = 256  # of the output, whose length is checked together
_STEP = object()  # marks the statement that checks the time


class TemplateRefusalError(Exception):
    """The template raises an error for these messages."""


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with limits."""
    first = int(hasattr(function, "jinja_pass_arg"))  # after the context or environment

    @wraps(function)
    def limited(*values: Any, **options: Any) -> Any:
        budget.step()
        if name == "join" and not isinstance(values[first], str | list | tuple):
            values = (*values[:first], list(values[first]), *values[first + 1 :])
        check_filter(name, values[first:], options)
        result = function(*values, **options)
        return result if type(result) is str and len(result) <= LONG else budget.measured(result)

    return limited


# ---- the environment


class _LimitingGenerator(CodeGenerator):
    """Compile templates so that loops, `~`, lists and mappings pass through the environment's limits."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(nodes.Const(_STEP), lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.Const) and node.node.value is _STEP:
            self.writeline("environment.step()")
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self.write("environment.add(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_values((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._measured(super().visit_List, node, frame, node.items)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._measured(super().visit_Tuple, node, frame, node.items if node.ctx == "load" else ())

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._measured(super().visit_Dict, node, frame, [pair.value for pair in node.items])

    def _measured(
        self, visit: Callable[..., None], node: nodes.Node, frame: Frame, items: Iterable[nodes.Node]
    ) -> None:
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
            return
        self.write("environment.measured(")
        visit(node, frame)
        self.write(")")


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers with limits."""

    code_generator_class = _LimitingGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    step = staticmethod(budget.step)
    add = staticmethod(add)
    measured = staticmethod(budget.measured)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a macro or block."""
        pieces = list(pieces)
        budget.take(sum(map(len, pieces)))
        return "".join(pieces)

    def concat_values(self, values: Sequence[Any]) -> str:
        """Return the texts of the operands of `~`, joined."""
        return self.concat(map(str, values))

    def call(__self, __context: Any, __object: Any, *values: Any, **options: Any) -> Any:
        budget.step()
        method = getattr(__object, "__wrapped__", __object)  # jinja2 wraps str.format
        name = getattr(method, "__name__", "")
        if isinstance(owner := getattr(method, "__self__", None), str | bytes | int):
            if name == "join" and values and not isinstance(values[0], str | list | tuple):
                values = (list(values[0]),)
            check_method(name, owner, (*values, *options.values()))
        return budget.measured(super().call(__context, __object, *values, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of a result before it is computed."""
        budget.step()
        if operator == "%" and isinstance(left, str | bytes):
            check_method("format", left, (right,))
        elif operator in ("*", "**"):
            check_product(operator, left, right)
        return budget.measured(super().call_binop(context, operator, left, right))


@lru_cache(maxsize=1)
def _environment() -> _LimitedEnvironment:
    """Return transformers' environment, with its functions and filters, limited."""
    usual = _compile_jinja_template("").environment
    extensions = [type(extension) for extension in usual.extensions.values()]
    made = _LimitedEnvironment(trim_blocks=usual.trim_blocks, lstrip_blocks=usual.lstrip_blocks, extensions=extensions)
    made.filters = {name: _limited(name, made) for name, made in usual.filters.items() if name not in _LEFT_OUT}
    made.globals = {name: value for name, value in usual.globals.items() if name not in _LEFT_OUT}
    # a namespace prints its values, which can be namespaces of namespaces
    made.globals["namespace"] = type("namespace", (usual.globals["namespace"],), {"__repr__": lambda self: "namespace"})
    return made


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > _MAX_SOURCE:
        raise TemplateLimitError(f"has {len(source):,} characters, and at most {_MAX_SOURCE:,} are read")
    budget.begin(_CONSTANTS)
    try:
        return _environment().from_string(source)
    except (RecursionError, MemoryError):
        raise TemplateLimitError("is nested too deeply") from None
    except SyntaxError as error:  # of Python's compiler: more than 20 nested blocks
        raise TemplateLimitError(f"cannot be compiled: {error.msg}") from None


def render_chat_template(
    source: str, messages: Sequence[dict[str, Any]], *, name: str, spans: bool = False, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, and with `spans` the spans of its `{% generation %}` blocks.

    source: the template. name: of its file, for errors. variables: `tools`, `add_generation_prompt` and the names of
    special tokens. Raises UserError if it is not a template or exceeds the limits, and TemplateRefusalError if it
    does not take these messages.
    """
    try:
        return _rendered(source, messages, spans, variables)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{name}:{error.lineno}: not jinja: {(error.message or '').rstrip('.')}.") from error
    except TemplateLimitError as error:
        raise UserError(f"{name}: the chat template {error}.", hint="Correct it, or use another one.") from error
    except (RecursionError, MemoryError, OverflowError) as error:
        what = {RecursionError: "calls itself too often", MemoryError: "needs too much memory"}
        why = what.get(type(error), f"computes too large a number ({_first_line(error)})")
        raise UserError(f"{name}: the chat template {why}.", hint="Correct it, or use another one.") from None
    except jinja2.TemplateError as error:
        raise TemplateRefusalError(_first_line(error)) from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise TemplateRefusalError(f"{name}: {_first_line(error)}") from error


def _rendered(
    source: str, messages: Sequence[dict[str, Any]], spans: bool, variables: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    template = _compiled(source)
    pieces: list[str] = []
    found: list[tuple[int, int]] = []
    length = 0
    most = MAX_ADDED  # characters of a text without a count of what is given, which usual texts do not need
    budget.begin()
    variables = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    variables["messages"] = [_with_reasoning(message) for message in messages]
    left = template.root_render_func(template.new_context(variables))
    tracker: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if spans:  # an extension of transformers adds the method to its environment
        tracker = template.environment.activate_tracker(pieces, found)  # type: ignore[attr-defined]
    with tracker:  # it reads the pieces before each block
        while some := list(islice(left, 1 if spans else _PIECES)):
            pieces += some
            length += sum(map(len, some))
            if length > most:
                most = longest_text(variables, length)
    return "".join(pieces), found


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has both names that templates read, as transformers does."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]


# ---- files of templates

# Templates by name, such as `data.prompt_template: chatml`: written for ligertune after the published formats, with its
# licence (Apache-2.0). They have no place for tools, and refuse rows with tools.
_FOLDER = Path(__file__).parent / "chat"
BUILT_IN = tuple(sorted(path.name.removesuffix(".jinja") for path in _FOLDER.glob("*.jinja")))


def read_template(name: str) -> str:
    """Return the text of a built-in template or, for any other name, of a file. Raises OSError or UnicodeError."""
    return read_template_file(template_path(name))


def template_path(name: str) -> Path:
    """Return the file of a built-in template, or `name` as a path. The recipe has made paths of files absolute."""
    return _FOLDER / f"{name}.jinja" if name in BUILT_IN else Path(name)


def known_templates(name: str) -> str:
    """Return a sentence that names the built-in templates, or the one that `name` is a misspelling of."""
    close = get_close_matches(name.lower(), BUILT_IN, n=1)
    return f"Did you mean {close[0]}?" if close else f"The built-in ones are {', '.join(BUILT_IN)}."


def read_template_file(path: Path) -> str:
    """Return the text of a template file; of a larger file, enough to refuse it. Raises OSError or UnicodeError."""
    if not path.is_file():
        raise OSError(f"{path} is not a regular file")
    with path.open("rb") as file:
        content = file.read(4 * _MAX_SOURCE + 1)  # a character has up to four bytes
    return content.decode("utf-8", "strict" if len(content) <= 4 * _MAX_SOURCE else "replace")


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the file that a tokenizer's chat template is from, for errors."""
    folder = Path(tokenizer.name_or_path)
    files = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    found = next((file for file in files if file.is_file()), files[0])
    return getattr(tokenizer, "chat_template_file", str(found))
