"""A model's chat template as text: compiled once, with what Hugging Face templates may use."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from ludic.errors import TemplateError
from ludic.inference.templates.skeletons import Skeletons, is_text, written

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
        self._with_holes = cache(partial(_compile, source, today, holes=True))
        self._skeletons: Skeletons | None = None
        if not _holds_text(self._template.environment, source):
            self._skeletons = Skeletons(
                lambda messages: self._rendered(self._template, messages),
                lambda messages: self._rendered(self._with_holes(), messages),
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation's text; raises `TemplateError` with what the template complains of."""
        if self._skeletons is not None and tools is None and add_generation_prompt:
            text = self._skeletons.spell(messages)
            if text is not None:
                return text
        try:
            return self._rendered(self._template, messages, tools, add_generation_prompt)
        except Exception as exc:
            roles = [str(m.get("role")) for m in messages]
            shown = ", ".join(roles if len(roles) <= 8 else [*roles[:3], "…", *roles[-3:]])
            raise TemplateError(
                f"the chat template cannot render messages of the roles [{shown}]: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    def _rendered(
        self,
        template: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        # What `template.render` does, without its rewriting of tracebacks, second copy of the
        # variables, and list of globals, which only imported templates need.
        environment = template.environment
        context = environment.context_class(environment, variables, template.name, template.blocks)
        return "".join(template.root_render_func(context))


def _holds_text(environment: Any, source: str) -> bool:
    """Whether the template puts what it wrote into variables, where it could look at it."""
    from jinja2 import nodes

    kinds = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Block)
    return environment.parse(source).find(kinds) is not None


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
