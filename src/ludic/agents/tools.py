"""Tools are plain typed functions: their schema, their arguments' checks, and their calls.

Whatever goes wrong in a call (no such tool, bad arguments, an exception, a time-out) is an answer
to the model and not an error of the program: `call_tool` returns it as a `ToolResult`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from ludic.errors import DeadlineError, NoThreadError, ToolError
from ludic.plumbing.text import clean_json, clean_text, words_of
from ludic.types import Message, ToolCall
from ludic.workers.deadlines import bounded
from ludic.workers.threads import EnvThreads, is_for_us

if TYPE_CHECKING:
    from pydantic import BaseModel

ToolFunction: TypeAlias = Callable[..., Any]


@runtime_checkable
class StatefulTool(Protocol):
    """A tool that remembers its earlier calls. Its class is what is registered: each agent makes
    an instance, whose `close` is called when an episode ends. It may be called again after that,
    and then remembers nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def close(self) -> None: ...


_threads = EnvThreads(max_threads=1024, max_abandoned=64)
_CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `schema` is what the chat template shows of it. Without a
    model of its `arguments`, whoever runs it checks them.

    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         a: The first one.
    ...     '''
    ...     return a + b
    >>> Tool.of(add).schema["function"]["parameters"]["required"]
    ['a']
    """

    name: str
    description: str
    function: ToolFunction
    schema: Mapping[str, Any]
    arguments: type[BaseModel] | None = field(default=None, repr=False)
    argument_names: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        function: ToolFunction | Tool,
        *,
        name: str | None = None,
        description: str | None = None,
    ) -> Tool:
        """Reads name, arguments and description from the signature and the docstring."""
        if isinstance(function, Tool):
            return function
        tool_name = str(name or getattr(function, "__name__", ""))
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", tool_name):
            raise ToolError(
                f"{function!r} cannot be a tool: {tool_name!r} is not a name that a model can "
                "call; give one with Tool.of(function, name=...)"
            )
        summary, argument_docs = _read_docstring(inspect.getdoc(function) or "")
        arguments, names, parameters = _arguments_model(tool_name, function, argument_docs)
        text = summary if description is None else description
        schema = function_schema(tool_name, text, parameters)
        return cls(tool_name, text, function, schema, arguments, names)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them; raises `ToolError` that names what is wrong."""
        if self.arguments is None:
            return dict(arguments)
        from pydantic import ValidationError

        try:
            checked = self.arguments.model_validate(dict(arguments))
        except ValidationError as exc:
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}"
                for e in exc.errors(include_url=False, include_context=False)
            )
            raise ToolError(f"bad arguments for tool {self.name!r}: {faults}") from exc
        return {name: getattr(checked, at) for at, name in self.argument_names.items()}


class OpenTools(Protocol):
    """A source's tools while it is open."""

    @property
    def tools(self) -> Sequence[Tool]: ...

    async def close(self) -> None:
        """Lets go of the source. Never raises."""


class ToolSource(Protocol):
    """A source of tools that has to be opened first: a server, say. An agent opens its sources
    with an episode's first turn and closes them at the episode's end."""

    async def open(self) -> OpenTools: ...


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer as text that can be stored. `error` is one sentence when the call failed."""

    content: str
    error: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", clean_text(self.content))
        if self.error is not None:
            object.__setattr__(self, "error", clean_text(self.error))

    def shown(self, max_chars: int | None) -> str:
        """The answer, with its middle left out if it is longer than `max_chars`."""
        if max_chars is None or len(self.content) <= max_chars:
            return self.content
        head, tail = max_chars - max_chars // 2, max_chars // 2
        cut = len(self.content) - max_chars
        end = self.content[-tail:] if tail else ""
        return f"{self.content[:head]}\n[… {cut} characters were left out …]\n{end}"

    @classmethod
    def failed(cls, sentence: str) -> ToolResult:
        return cls(f"Error: {sentence}", sentence)


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """How a model is told of a tool."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tools_by_name(tools: Sequence[ToolFunction | Tool]) -> dict[str, Tool]:
    """The tools under their names; two of one name are an error. A class of tools with state gives
    a new one."""
    named: dict[str, Tool] = {}
    for entry in tools:
        if isinstance(entry, type) and callable(getattr(entry, "close", None)):
            entry = entry()
        tool = Tool.of(entry)
        if tool.name in named:
            raise ToolError(f"two tools are named {tool.name!r}: rename one with Tool.of(name=...)")
        named[tool.name] = tool
    return named


async def end_episode(tools: Mapping[str, Tool]) -> None:
    """Closes the tools with state, in worker threads."""
    for tool in tools.values():
        if isinstance(tool.function, StatefulTool):
            whom = f"tool {tool.name!r}"
            await _threads.run(tool.function.close, what="its end", whom=whom, timeout_s=_CLOSE_S)


def tool_message(call: ToolCall, content: str) -> Message:
    """The answer to `call`, in the shape of a chat template."""
    name = call["function"]["name"]
    return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": name}


async def call_tool(
    tools: Mapping[str, Tool], call: ToolCall, *, timeout_s: float | None
) -> ToolResult:
    """Runs one call. A plain function runs in a worker thread, a coroutine on the event loop.

    Never raises for what the tool or its arguments do, `sys.exit` and the like included. A
    cancellation of the caller propagates, and so does a `NoThreadError`: when too many tools hang,
    no answer of this one would be its own.
    """
    name = call["function"]["name"]
    tool = tools.get(name)
    if tool is None:
        names = ", ".join(sorted(tools)) or "none"
        return ToolResult.failed(f"there is no tool {name!r}; the tools are: {names}")
    try:
        arguments = tool.check(call["function"]["arguments"])
        return ToolResult(as_text(await _run(tool, arguments, timeout_s)))
    except DeadlineError:
        return ToolResult.failed(f"tool {name!r} did not answer within {timeout_s:g} s")
    except NoThreadError:
        raise
    except ToolError as exc:  # bad arguments, or the tool's own words to the model
        return ToolResult.failed(str(exc))
    except BaseException as exc:
        if is_for_us(exc):
            raise
        return ToolResult.failed(f"tool {name!r} raised {type(exc).__name__}: {words_of(exc)}")


async def _run(tool: Tool, arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
    whom = f"tool {tool.name!r}"
    call = functools.partial(tool.function, **arguments)
    if inspect.iscoroutinefunction(tool.function):
        answer = call()
    else:
        answer = await _threads.run(call, what="an answer", whom=whom, timeout_s=timeout_s)
        if not inspect.isawaitable(answer):  # an object may turn out to be async when called
            return answer
    return await bounded(answer, "an answer", whom, timeout_s)


def as_text(value: Any) -> str:
    """What a tool returned, as the model is shown it: text as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    from pydantic_core import to_json

    def text_of(other: Any) -> str:
        return clean_text(str(other))

    return to_json(clean_json(value), inf_nan_mode="constants", fallback=text_of).decode()


def _arguments_model(
    tool_name: str, function: ToolFunction, argument_docs: Mapping[str, str]
) -> tuple[type[BaseModel], dict[str, str], dict[str, Any]]:
    """A pydantic model of the arguments, whose fields are numbered and aliased, since an argument
    may have a name that a model's own attributes use; the names by these fields; and the JSON
    schema without the titles that pydantic adds: they cost tokens."""
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError, NameError) as exc:
        raise ToolError(f"tool {tool_name!r}: its signature cannot be read: {exc}") from exc
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for i, (name, parameter) in enumerate(parameters.items()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(
                f"tool {tool_name!r}: {parameter} cannot be passed by name; models call tools "
                "with named arguments only"
            )
        if parameter.annotation is parameter.empty:
            raise ToolError(f"tool {tool_name!r}: argument {name!r} has no type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        at = f"argument_{i}"
        names[at] = name
        fields[at] = (
            parameter.annotation,
            Field(default, alias=name, description=argument_docs.get(name)),
        )
    try:
        model = create_model(tool_name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema(by_alias=True)
    except PydanticUserError as exc:
        raise ToolError(f"tool {tool_name!r}: its arguments have no JSON schema: {exc}") from exc
    schema.pop("title", None)
    schema.pop("additionalProperties", None)
    for entry in schema.setdefault("properties", {}).values():
        entry.pop("title", None)
    return model, names, schema


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """What a Google style docstring says before its sections, and of each argument."""
    lines = doc.splitlines()
    heads = [i for i, line in enumerate(lines) if re.fullmatch(r"[A-Z][A-Za-z ]*:", line)]
    summary = " ".join(" ".join(lines[: heads[0]] if heads else lines).split())
    start = next((i for i in heads if lines[i] in ("Args:", "Arguments:")), None)
    if start is None:
        return summary, {}
    end = next((i for i in heads if i > start), len(lines))
    arguments: dict[str, str] = {}
    body = [line for line in lines[start + 1 : end] if line.strip()]
    indent = len(body[0]) - len(body[0].lstrip()) if body else 0
    current = ""
    for line in body:
        entry = re.match(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if entry and len(line) - len(line.lstrip()) == indent:
            current = entry[1]
            arguments[current] = entry[2].strip()
        elif current:
            arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return summary, arguments
