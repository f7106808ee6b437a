"""The conformance kit of precision policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from attrs import asdict

from kimicore.contracts import ModuleView, Precision, PrecisionRules
from kimicore.errors import ConfigError
from kimicore.guard import RAISED
from kimicore.policies.precision import PRECISIONS, ResolvedMap, resolve_precision
from kimicore.testing.names import Name
from kimicore.testing.promises import Check, Effort, Judge, Story, Together, explore, named
from kimicore.testing.settings_check import check_settings

__all__ = ["check_precision"]

PROMISES = {
    "settings": "the settings are a frozen record with a name",
    "never-raises": "no model makes it raise, and it answers with PrecisionRules",
    "complete": "every module of a model gets a precision, and exact names are names of the model",
    "known": "every precision that the rules name is known",
    "possible": "no module gets a precision that its weight cannot be kept in",
    "unchanged": "it changes nothing that it is given",
    "repeatable": "the same modules give the same rules, in every process",
    "round-trip": "the map that the rules give is the same after it was written and read",
}
_BY_MODELS = tuple(name for name in PROMISES if name != "settings")


def check_precision(
    maker: Callable[[], Precision], *, examples: int = 60, steps: int = 30, seed: int = 0
) -> list[Check]:
    """Return the checks of a precision policy, one for each promise of :class:`~kimicore.contracts.Precision`.

    ``maker``: called without arguments, returns the settings: the class itself, or a function that gives some.
    ``examples``: how many models each check tries; ``seed`` chooses them. ``steps`` is there for the likeness of kits.
    Under pytest: ``@pytest.mark.parametrize("check", check_precision(MyPolicy), ids=str)`` over a test that calls
    ``check()``. Nothing runs before that.
    """
    effort = Effort(examples, steps, seed, shrinks=1000)
    together = Together(partial(_by_models, maker, effort), _BY_MODELS)
    searches: dict[str, Callable[[], None]] = {
        "settings": lambda: check_settings("precision", maker, None, None),
        **{name: partial(together.check, name) for name in _BY_MODELS},
    }
    policy = named(maker)
    return [Check("precision", policy, name, promise, searches[name]) for name, promise in PROMISES.items()]


def _by_models(maker: Callable[[], Any], effort: Effort, promises: Collection[str]) -> None:
    from hypothesis import strategies as st

    sizes = st.sampled_from([32, 64, 576, 640, 1024, 2048])
    explore(
        lambda **model: _look(maker, Judge(promises, Story()), **model),
        effort,
        layers=st.integers(1, 14),
        hidden=sizes,
        inner=sizes,
        biases=st.booleans(),
        head=st.booleans(),
    )


def _model(layers: int, hidden: int, inner: int, biases: bool, head: bool, salt: int = 0) -> tuple[ModuleView, ...]:
    """Return the modules of a made-up model, named as loaded ones are."""
    found: list[tuple[str, str, tuple[int, ...]]] = [("embed_tokens", "embedding", (320, hidden))]
    for layer in range(layers):
        at = f"layers.{layer}"
        found.append((f"{at}.input_layernorm", "norm", (hidden,)))
        for part in "qkvo":
            found.append((f"{at}.self_attn.{part}_proj", "attention", (hidden, hidden)))
            if biases:
                found.append((f"{at}.self_attn.{part}_proj.bias", "attention", (hidden,)))
        found.append((f"{at}.post_attention_layernorm", "norm", (hidden,)))
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            found.append((f"{at}.mlp.{part}_proj", "ffn", shape))
            if biases:
                found.append((f"{at}.mlp.{part}_proj.bias", "ffn", shape[:1]))
    found.append(("norm", "norm", (hidden,)))
    if head:
        found.append(("lm_head", "head", (320, hidden)))
    return tuple(ModuleView(Name(name, salt) if salt else name, kind, shape) for name, kind, shape in found)


def _look(maker: Callable[[], Any], judge: Judge, **model: Any) -> None:
    modules = _model(**model)
    judge.story.tell("rules() for a model of " + ", ".join(f"{name} {value}" for name, value in model.items()))
    given: Sequence[ModuleView] = list(modules)
    rules = _rules(maker, judge, given)
    if list(given) != list(modules) or any(asdict(one) != asdict(two) for one, two in zip(given, modules, strict=True)):
        judge.broken("unchanged", "the list of modules that it was given is another one now")
    if rules is None:
        return
    for salt in (0, 1):
        other = _rules(maker, judge, _model(**model, salt=salt))
        if other is not None and _plain(other) != _plain(rules):
            judge.broken("repeatable", f"asked again it answered {other!r} in place of {rules!r}")
    _weigh(rules, modules, judge)
    error: BaseException | None = None
    try:
        resolved = resolve_precision(rules, modules)
        again = ResolvedMap.from_json(resolved.to_json())
    except ConfigError:
        return  # the promises above say why
    except RAISED as raised:
        error = raised
    if error is not None:
        judge.broken("round-trip", f"resolving the rules raised {error!r}")
    elif again != resolved:
        judge.broken("round-trip", "the map that was read differs from the one that was written")
    elif {one.module.name: one.precision for one in resolved.modules} != _oracle(rules, modules):
        judge.broken("round-trip", "the resolved map is not what exact names, patterns and default say")


def _rules(maker: Callable[[], Any], judge: Judge, modules: Sequence[ModuleView]) -> PrecisionRules | None:
    error: BaseException | None = None
    rules: Any = None
    try:
        rules = maker().rules(modules)
    except RAISED as raised:
        error = raised
    if error is not None:
        judge.broken("never-raises", f"it raised {error!r}")
        return None
    if not isinstance(rules, PrecisionRules):
        judge.broken("never-raises", f"it answered {rules!r}, which is no PrecisionRules")
        return None
    pairs = isinstance(rules.patterns, tuple) and all(
        isinstance(one, tuple) and len(one) == 2 for one in rules.patterns
    )
    if not pairs or not isinstance(rules.exact, Mapping):
        judge.broken("never-raises", f"exact is a mapping and patterns a tuple of pairs in {rules!r}")
        return None
    return rules


def _plain(rules: PrecisionRules) -> Any:
    """Return rules as something that compares by what it says, whatever its names hash to."""
    return {str(name): one for name, one in rules.exact.items()}, rules.patterns, rules.default


def _oracle(rules: PrecisionRules, modules: Sequence[ModuleView]) -> dict[str, str | None]:
    """Return each module's precision by its exact name, else the first pattern that matches, else the default."""
    exact = dict(rules.exact)
    found: dict[str, str | None] = {}
    for module in modules:
        matching = [precision for pattern, precision in rules.patterns if fnmatchcase(module.name, pattern)]
        found[module.name] = exact.get(module.name, matching[0] if matching else rules.default)
    return found


def _weigh(rules: PrecisionRules, modules: Sequence[ModuleView], judge: Judge) -> None:
    strangers = sorted(set(rules.exact) - {module.name for module in modules})
    if strangers:
        judge.broken("complete", f"{strangers[0]!r} is an exact name, and the model has no such module")
    used = [*rules.exact.values(), *(precision for _, precision in rules.patterns)]
    used += [rules.default] if rules.default is not None else []
    for precision in used:
        if precision not in PRECISIONS:
            judge.broken("known", f"{precision!r} is no known precision; known are {', '.join(PRECISIONS)}")
    found = _oracle(rules, modules)
    for module in modules:
        own = found[module.name]
        if own is None:
            judge.broken("complete", f"no rule gives {module.name!r} a precision")
        elif own in PRECISIONS:
            fault = PRECISIONS[own].fault(module)
            if fault:
                judge.broken("possible", f"{module.name!r} of shape {module.shape} got {own}: {fault}")
