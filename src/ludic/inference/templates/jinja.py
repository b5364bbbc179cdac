"""A model's chat template as text: compiled once, with what Hugging Face templates may use.

Most chat templates look at a message's role and place, and add its content unchanged. With such a
template, two conversations with the same roles differ only in their contents. So each series of
roles is rendered once, with holes for the contents; the text around the holes, the skeleton, then
renders every conversation with these roles. This takes microseconds per message, which matters
because every turn of every episode renders its whole conversation.

A hole can be concatenated and written out. Anything else that a template does with a content (trim
it, search it, ask whether it is empty) would depend on it: a hole then raises, and conversations of
these roles are rendered one by one.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeAlias

from ludic.errors import TemplateError

_MARK = "\ufdd1"
"""Around a hole's number. A code point that Unicode keeps for internal use: no template has it."""
_MARKED = re.compile(f"{_MARK}(\\d+){_MARK}")
_KEYS = ("role", "content")
_MOST_SHAPES = 512

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class Looked(BaseException):
    """The template looked into a content. Not an `Exception`, some of which Jinja's tests catch."""


def _look(*_: Any, **__: Any) -> NoReturn:
    raise Looked


class Hole:
    """A text with contents that are not known yet."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __add__(self, other: object) -> Hole:
        return Hole(self._text + _spelled(other))

    def __radd__(self, other: object) -> Hole:
        return Hole(_spelled(other) + self._text)

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __hash__ = _look
    __str__ = __repr__ = __format__ = __int__ = __float__ = __index__ = _look
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _look
    __mul__ = __rmul__ = __mod__ = __rmod__ = _look


def written(value: Any) -> Any:
    """What a template writes out for `value`: Jinja's `finalize`."""
    return value._text if type(value) is Hole else value


def is_text(value: Any) -> bool:
    """Jinja's test `string`, for which a hole is one."""
    return isinstance(value, str | Hole)


def _spelled(value: object) -> str:
    if type(value) is Hole:
        return value._text
    if type(value) is str:
        return value
    raise Looked


class Skeletons:
    """The skeletons of one template, by roles. `render` is the template, and `with_holes` the same
    one compiled to take holes. Safe to share between threads: at worst two make the same one."""

    def __init__(
        self, render: Callable[[Messages], str], with_holes: Callable[[Messages], str]
    ) -> None:
        self._render, self._with_holes = render, with_holes
        self._known: dict[tuple[str, ...], _Skeleton | None] = {}

    def spell(self, messages: Messages) -> str | None:
        """The conversation's text; None where the template must render it."""
        roles, contents = [], []
        for message in messages:
            if type(message) is not dict or tuple(message) != _KEYS:
                return None
            role, content = message.values()
            if type(role) is not str or type(content) is not str:
                return None
            roles.append(role)
            contents.append(content)
        shape = tuple(roles)
        try:
            skeleton = self._known[shape]
        except KeyError:
            skeleton = self._find(shape, messages, contents)
        return None if skeleton is None else skeleton.filled(contents)

    def _find(
        self, shape: tuple[str, ...], messages: Messages, contents: list[str]
    ) -> _Skeleton | None:
        if len(self._known) >= _MOST_SHAPES:
            return None
        skeleton = None
        holes = [{"role": r, "content": Hole(f"{_MARK}{i}{_MARK}")} for i, r in enumerate(shape)]
        try:
            skeleton = _Skeleton(_MARKED.split(self._with_holes(holes)))
            if skeleton.filled(contents) != self._render(messages):
                skeleton = None
        except (Looked, Exception):  # the template says itself what is wrong, when it renders
            skeleton = None
        self._known[shape] = skeleton
        return skeleton


class _Skeleton:
    """Text and the numbers of contents in turn, as `re.split` returns them."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts
        self._order = [int(number) for number in parts[1::2]]

    def filled(self, contents: list[str]) -> str:
        parts = self._parts.copy()
        parts[1::2] = [contents[number] for number in self._order]
        return "".join(parts)


_LOOP_COUNTERS = frozenset(
    ("first", "last", "index", "index0", "length", "previtem", "nextitem", "revindex", "revindex0")
)
_DICT_METHODS = frozenset(dir(dict))


class JinjaTemplate:
    """Renders messages to text. The date that a template may print is fixed, so that a run can be
    repeated on another day."""

    def __init__(self, source: str, variables: Mapping[str, Any], today: dt.date) -> None:
        self._template = _compile(source, today)
        self._variables = {**self._template.globals, **variables}
        self._with_holes = partial(_compile, source, today, holes=True)
        self._skeletons: Skeletons | None = None
        if not _holds_text(source, today):
            self._skeletons = Skeletons(
                lambda messages: self._rendered(self._template, messages),
                lambda messages: self._rendered(self._with_holes(), messages),
            )

    def render(self, messages: Messages, tools: Messages | None) -> str:
        """The conversation's text; raises `TemplateError` with what the template complains of."""
        if self._skeletons is not None and tools is None:
            text = self._skeletons.spell(messages)
            if text is not None:
                return text
        try:
            return self._rendered(self._template, messages, tools)
        except Exception as exc:
            roles = [str(m.get("role")) for m in messages]
            shown = ", ".join(roles if len(roles) <= 8 else [*roles[:3], "…", *roles[-3:]])
            raise TemplateError(
                f"the chat template cannot render messages of the roles [{shown}]: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    def _rendered(self, template: Any, messages: Messages, tools: Messages | None = None) -> str:
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        # What `template.render` does, without its rewriting of tracebacks, second copy of the
        # variables, and list of globals, which only imported templates need.
        environment = template.environment
        context = environment.context_class(environment, variables, template.name, template.blocks)
        return "".join(template.root_render_func(context))


@lru_cache(maxsize=32)
def _holds_text(source: str, today: dt.date) -> bool:
    """Whether the template puts what it wrote into variables, where it could look at it."""
    from jinja2 import nodes

    kinds = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Block)
    return _compile(source, today).environment.parse(source).find(kinds) is not None


@lru_cache(maxsize=32)  # a run makes several templates from the same text
def _compile(source: str, today: dt.date, *, holes: bool = False) -> Any:
    """The template; with `holes`, one that writes out those of `skeletons`."""
    import jinja2
    import jinja2.ext
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the model writes; here it is rendered as it stands."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox, with a short way for what chat templates consist of. All of it is
        allowed there: a loop's public counters, the keys of a message, which may be missing, and
        `namespace()`."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            kind = type(obj)
            if kind is LoopContext:
                if attribute in _LOOP_COUNTERS:
                    return getattr(obj, attribute)
            elif kind is dict and attribute not in _DICT_METHODS and attribute in obj:
                return obj[attribute]
            return super().getattr(obj, attribute)

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            if obj is Namespace:
                for scope in ("_block_vars", "_loop_vars"):  # which only functions are told of
                    kwargs.pop(scope, None)
                return Namespace(*args, **kwargs)
            return super().call(context, obj, *args, **kwargs)

        def getitem(self, obj: Any, argument: Any) -> Any:
            if type(obj) is dict and type(argument) is str and argument not in _DICT_METHODS:
                if argument in obj:
                    return obj[argument]
                return self.undefined(obj=obj, name=argument)
            return super().getitem(obj, argument)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    if holes:
        environment.finalize = written
        environment.tests["string"] = is_text
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = today.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as exc:
        raise TemplateError(f"the chat template is not valid Jinja: {exc}") from exc
