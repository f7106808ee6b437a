"""A Jinja environment for templates that come with a model: they can lay out text and nothing else.

Jinja's sandbox keeps a template away from Python's internals. What it does not bound is work: a few lines can
loop for years or ask for a string of a terabyte. Here every loop, call, filter and operation draws on a
:class:`Budget`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["Budget", "TemplateSandbox"]

MAX_INTEGER = 100_000
MAX_BITS = 4_096
_BLOCKED_FILTERS = ("pprint", "random", "urlize", "xmlattr")
_BLOCKED_METHODS = frozenset(("translate", "to_bytes", "from_bytes"))
_WIDE_FORMAT = re.compile(r"\d{5,}|[:!][^{}]*\{")
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")


class Budget:
    """What one rendering may spend: ``steps`` (loop turns, calls, filters) and ``chars`` of text made on the way."""

    def __init__(self, steps: int, chars: int) -> None:
        self._steps = steps
        self._chars = self._limit = chars
        self._weights: dict[int, tuple[Any, int]] = {}

    def step(self, count: int = 1) -> None:
        """Count loop turns or calls."""
        self._steps -= count
        if self._steps < 0:
            raise SecurityError("the template takes too many steps")

    def text(self, chars: int) -> None:
        """Count characters that are about to be made."""
        self._chars -= chars
        if self._chars < 0:
            raise SecurityError("the template makes too much text")

    def weigh(self, value: Any) -> int:
        """Return how much text a value would be, and refuse one that is too much.

        A list that holds another one twice doubles with every level; what a level weighs is remembered, so
        weighing stays cheap where writing it out would not.
        """
        if isinstance(value, (str, bytes)):
            return 1 + len(value)
        if not isinstance(value, (list, tuple, dict)):
            return 1
        known = self._weights.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        parts: Iterable[Any] = value
        if isinstance(value, dict):
            parts = [*value, *value.values()]
        self.step(len(value))
        weight = 1 + sum(map(self.weigh, parts))
        if weight > self._limit:
            raise SecurityError("the template makes too large a value")
        self._weights[id(value)] = (value, weight)
        return weight


class _Counting(NodeTransformer):
    """Puts the budget's checks around loops, literals and joined text."""

    def _wrapped(self, node: Any, name: str, around: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=around.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._wrapped(node.iter, " counted", node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._wrapped(nodes.List(node.nodes, lineno=node.lineno), " joined", node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._wrapped(node, " made", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._wrapped(node, " made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._wrapped(node, " made", node) if node.ctx == "load" else node


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's part for training, is just its content here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled and rendered in, set up as `transformers` does.

    Threads may share it; each rendering runs :meth:`spending` a budget.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation])
        self._local = threading.local()
        for name in _BLOCKED_FILTERS:
            self.filters.pop(name, None)
        self.filters["tojson"] = self._tojson
        self.filters = {name: self._guarded(name, one) for name, one in self.filters.items()}
        self.filters |= {" counted": self._counted, " joined": self._joined, " made": self._made}
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.concat = self._concat  # type: ignore[method-assign]

    def render(self, template: jinja2.Template, variables: Mapping[str, Any], budget: Budget) -> str:
        """Return the template's text; raises what Jinja raises, SecurityError where the budget is spent."""
        self._local.budget = budget
        try:
            return self._concat(template.root_render_func(template.new_context(dict(variables))))
        finally:
            del self._local.budget

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    # ------------------------------------------------------------ what a template does

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``obj`` for the template, within the budget."""
        self._budget.step()
        if not isinstance(obj, Macro):
            target = getattr(obj, "__wrapped__", obj)
            self._check_call(getattr(target, "__name__", ""), getattr(target, "__self__", None), args, kwargs)
            if getattr(target, "__name__", "") == "join" and args:
                args = (list(args[0]), *args[1:])
                self._budget.text(sum(map(self._budget.weigh, args[0])))
        return self._weighed(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Work out an operation whose result could be huge, within the budget."""
        budget = self._budget
        budget.step()
        numbers = [one for one in (left, right) if isinstance(one, int)]
        others = [one for one in (left, right) if isinstance(one, (str, bytes, list, tuple))]
        if operator == "*" and numbers and others:
            budget.text(max(0, numbers[0]) * budget.weigh(others[0]))
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_percent(left)
            budget.text(budget.weigh(left) * 2 + budget.weigh(right))
        elif operator == "+" and len(others) == 2:
            budget.text(budget.weigh(left) + budget.weigh(right))
        elif operator in ("*", "**") and len(numbers) == 2:
            bits = left.bit_length()
            if (bits * max(0, right) if operator == "**" else bits + right.bit_length()) > MAX_BITS:
                raise SecurityError("the template makes too large a number")
        return self._weighed(super().call_binop(context, operator, left, right))

    def _check_call(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name in _BLOCKED_METHODS:
            raise SecurityError(f"the template calls {name}(), which templates may not")
        for one in (*args, *kwargs.values()):
            if isinstance(one, int) and abs(one) > MAX_INTEGER:
                raise SecurityError(f"the template passes {one} to {name}(); at most {MAX_INTEGER} is taken")
        if not isinstance(owner, (str, bytes)):
            return
        budget = self._budget
        if name in ("format", "format_map") and isinstance(owner, str) and _WIDE_FORMAT.search(owner):
            raise SecurityError("the template formats with a width that is too large or not fixed")
        if name == "replace" and len(args) > 1:
            budget.text(_replaced_chars(owner, args[0], args[1]))
        elif name == "expandtabs":
            budget.text(len(owner) * max((8, *(one for one in args if isinstance(one, int)))))
        elif name == "join":
            budget.text(len(owner) * (len(args[0]) if args and isinstance(args[0], Sized) else 0))
        budget.text(len(owner))

    def _weighed(self, value: Any) -> Any:
        if isinstance(value, (str, bytes, list, tuple, dict)):
            weight = self._budget.weigh(value)
            if isinstance(value, (str, bytes)):
                self._budget.text(weight)
        return value

    def _guarded(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts, refuses large numbers, and is given no more than it may make."""

        @wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget
            budget.step()
            given = [one for one in args if not isinstance(one, (Context, jinja2.Environment, nodes.EvalContext))]
            rest = given[1:]
            if name != "default":
                self._check_call(name, None, tuple(rest), kwargs)
            value = given[0] if given else None
            if name == "sum" and isinstance(kwargs.get("start", rest[1] if len(rest) > 1 else 0), (str, list, tuple)):
                raise SecurityError("the template sums up what are no numbers")
            if name == "format":
                _check_percent(value)
            if name == "replace" and len(rest) > 1:
                budget.text(_replaced_chars(str(value), str(rest[0]), str(rest[1])))
            if name == "indent":
                width = kwargs.get("width", rest[0] if rest else 4)
                budget.text(str(value).count("\n") * (width if isinstance(width, int) else len(str(width))))
            if name == "join":
                sized = value if isinstance(value, Sized) else list(value or ())
                args = tuple(sized if one is value else one for one in args)
                between = kwargs.get("d", rest[0] if rest else "")
                budget.text(len(sized) * len(str(between)) + sum(map(budget.weigh, sized)))  # type: ignore[call-overload]
            return self._weighed(run(*args, **kwargs))

        return guarded

    def _counted(self, value: Any) -> Any:
        if isinstance(value, Sized):
            self._budget.step(len(value))
            return value
        return self._turns(value)

    def _turns(self, value: Iterable[Any]) -> Iterator[Any]:
        for one in value:
            self._budget.step()
            yield one

    def _made(self, value: Any) -> Any:
        self._budget.weigh(value)
        return value

    def _joined(self, values: list[Any]) -> str:
        self._budget.text(sum(map(self._budget.weigh, values)))
        return "".join(map(str, values))

    def _concat(self, parts: Iterable[str]) -> str:
        kept: list[str] = []
        for part in parts:
            self._budget.text(len(part))
            kept.append(part)
        return "".join(kept)

    def _range(self, *args: int) -> range:
        found = range(*args)
        if len(found) > MAX_INTEGER:  # what goes over it counts its turns
            raise SecurityError(f"the template asks for a range of {len(found)}; at most {MAX_INTEGER} is taken")
        return found

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        self._budget.text(self._budget.weigh(value))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_percent(value: Any) -> None:
    if _WIDE_PERCENT.search(value if isinstance(value, str) else str(value)):
        raise SecurityError("the template formats with a width that is too large or not fixed")


def _replaced_chars(text: Any, old: Any, new: Any) -> int:
    try:
        return int(len(text) + text.count(old) * len(new))
    except TypeError:
        return 0  # wrong types: the call itself says so


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message)[:1000])


def _strftime_now(form: str) -> str:
    if len(form) > 100:
        raise SecurityError("the template asks for a date in a form of more than 100 characters")
    return datetime.now().strftime(form)
