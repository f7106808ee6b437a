"""Precision maps: one precision per module, all faults at once, and records that can be kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kimicore.contracts import ModuleView, Precision, PrecisionRules
from kimicore.errors import ConfigError
from kimicore.plugins import KINDS, resolve
from kimicore.policies.precision import PRECISIONS, ActivationPrecision, ResolvedMap, resolve_precision
from kimicore.policies.precision.named import map_names, policy_named, resolved_by, smaller_groups

MODEL = (
    ModuleView("embed_tokens", "embedding", (1000, 256)),
    ModuleView("layers.0.input_layernorm", "norm", (256,)),
    ModuleView("layers.0.self_attn.q_proj", "attention", (256, 256)),
    ModuleView("layers.0.self_attn.q_proj.bias", "attention", (256,)),
    ModuleView("layers.0.mlp.up_proj", "ffn", (640, 256)),
    ModuleView("layers.0.mlp.up_proj.bias", "ffn", (640,)),
    ModuleView("layers.0.mlp.down_proj", "ffn", (256, 640)),
    ModuleView("norm", "norm", (256,)),
    ModuleView("lm_head", "head", (1000, 256)),
)


def rules(
    exact: dict[str, str] | None = None, patterns: Sequence[tuple[str, str]] = (), default: str | None = "bfloat16"
) -> PrecisionRules:
    return PrecisionRules(exact or {}, tuple(patterns), default)


def refusal(given_rules: PrecisionRules, modules: Sequence[ModuleView] = MODEL) -> str:
    """Return what the error says."""
    with pytest.raises(ConfigError) as caught:
        resolve_precision(given_rules, modules)
    return str(caught.value)


# ---------------------------------------------------------------- resolution


def test_exact_goes_before_patterns_and_the_first_pattern_counts() -> None:
    """An exact name wins over patterns, the first matching pattern over later ones, and the default takes the rest."""
    found = resolve_precision(
        rules({"layers.0.mlp.up_proj": "int8"}, [("*.mlp.*proj", "int4"), ("layers.*", "float16")]), MODEL
    )
    assert {one.module.name: (one.precision, one.rule) for one in found.modules} == {
        "embed_tokens": ("bfloat16", "default"),
        "layers.0.input_layernorm": ("float16", "layers.*"),
        "layers.0.self_attn.q_proj": ("float16", "layers.*"),
        "layers.0.self_attn.q_proj.bias": ("float16", "layers.*"),
        "layers.0.mlp.up_proj": ("int8", "exact"),
        "layers.0.mlp.up_proj.bias": ("float16", "layers.*"),
        "layers.0.mlp.down_proj": ("int4", "*.mlp.*proj"),
        "norm": ("bfloat16", "default"),
        "lm_head": ("bfloat16", "default"),
    }
    assert found.precision("layers.0.mlp.down_proj") == "int4"
    with pytest.raises(KeyError):
        found.precision("layers.9.mlp.down_proj")


def test_all_faults_are_told_at_once() -> None:
    """One error names every module that no rule matches, that gets an unknown precision or one it cannot have, and
    every exact name that the model has not."""
    text = refusal(
        rules(
            {"layers.0.mlp.gate_proj": "int8", "norm": "int8"},
            [("*q_proj.bias", "int4"), ("*.up_proj", "int6"), ("*.down_proj", "int4"), ("layers.*", "bfloat16")],
            None,
        ),
        [evolve(one, shape=(256, 600)) if one.name.endswith("down_proj") else one for one in MODEL],
    )
    assert "has 7 faults" in text
    assert "layers.0.mlp.gate_proj: the model has no module of this name" in text
    assert "norm: int8 is for matrices and this is a norm: keep it at 16 or 32 bits" in text
    assert "layers.0.self_attn.q_proj.bias: int4 is for matrices and this is a vector of 256" in text
    assert "layers.0.mlp.up_proj: precision 'int6' is not known; known are float32" in text
    assert "layers.0.mlp.down_proj: 600 inputs are not a multiple of int4's groups of 128: choose int8, or" in text
    assert "embed_tokens: no rule matches it; add a pattern such as '*', or a default" in text
    assert "lm_head: no rule matches it" in text


def test_a_group_that_does_not_fit_is_told_with_those_that_do() -> None:
    """Where groups of 128 do not divide the inputs, the error names the precisions that do."""
    text = refusal(rules({"a": "int4"}), [ModuleView("a", "ffn", (8, 192))])
    assert "choose int8 or int5 or int4-g64 or int4-g32, or 16 bits" in text


def test_a_pattern_with_an_unknown_precision_is_an_error_also_where_nothing_matches_it() -> None:
    """A misspelt precision is told although no module would get it today."""
    assert "nothing.*: precision 'int7'" in refusal(rules(patterns=[("nothing.*", "int7")]))


def test_names_must_differ() -> None:
    """Two modules of one name are an error."""
    assert "norm: named 2 times" in refusal(rules(), [*MODEL, MODEL[-2]])


def test_long_lists_of_faults_are_cut() -> None:
    """Of very many faults the first twenty are listed and the others counted."""
    many = [ModuleView(f"m{at}", "norm", (4,)) for at in range(50)]
    text = refusal(rules(default="int8"), many)
    assert text.count("keep it at") == 20
    assert text.endswith("and 30 more")


NAMES = st.sampled_from(["a", "a.b", "a.b.c", "a.c", "b", "b.mlp", "c.mlp.x", "norm"])
FLOATS = st.sampled_from(["float32", "bfloat16", "float16"])


@st.composite
def models(draw: st.DrawFn) -> list[ModuleView]:
    """A few modules whose matrices take any precision."""
    found = []
    for name in draw(st.lists(NAMES, unique=True, min_size=1)):
        if name == "norm":
            found.append(ModuleView(name, "norm", (draw(st.integers(1, 300)),)))
        else:
            kind = draw(st.sampled_from(["attention", "ffn", "embedding", "head"]))
            found.append(ModuleView(name, kind, (draw(st.integers(1, 9)), 128 * draw(st.integers(1, 3)))))
    return found


@given(
    models(),
    st.dictionaries(NAMES, FLOATS, max_size=3),
    st.lists(st.tuples(st.sampled_from(["*", "a*", "*.mlp*", "b", "?.c", "norm"]), FLOATS), max_size=4),
    st.none() | FLOATS,
)
def test_every_module_gets_exactly_one_precision_or_is_named(
    modules: list[ModuleView], exact: dict[str, str], patterns: list[tuple[str, str]], default: str | None
) -> None:
    """Whatever the rules are, each module has the precision of the rule that ranks first, or the error names it."""
    wanted: dict[str, str | None] = {}
    for one in modules:
        matching = [precision for pattern, precision in patterns if fnmatchcase(one.name, pattern)]
        wanted[one.name] = exact.get(one.name, (matching or [default])[0])
    strangers = exact.keys() - wanted.keys()
    left = [name for name, precision in wanted.items() if precision is None]
    if strangers or left:
        text = refusal(rules(exact, patterns, default), modules)
        assert all(f"\n  {name}: " in text for name in (*strangers, *left))
        return
    found = resolve_precision(rules(exact, patterns, default), modules)
    assert [one.module for one in found.modules] == modules
    assert {one.module.name: one.precision for one in found.modules} == wanted


# ---------------------------------------------------------------- records


@given(models(), st.data())
def test_a_map_survives_its_json(modules: list[ModuleView], data: st.DataObject) -> None:
    """A map that is written and read is the same map with the same fingerprint."""
    exact = {
        one.name: data.draw(st.sampled_from(list(PRECISIONS)) if one.kind != "norm" else FLOATS) for one in modules
    }
    acts = ActivationPrecision("float16", "int8", first_tokens=data.draw(st.integers(0, 9)), last_tokens=3)
    found = resolve_precision(rules(exact, default=None), modules, acts)
    again = ResolvedMap.from_json(found.to_json())
    assert again == found
    assert again.fingerprint == found.fingerprint
    assert again.table() == found.table() == str(found)


def test_a_fingerprint_tells_what_changes_bytes() -> None:
    """The fingerprint changes with a precision, a shape and the activations; rules and order do not matter."""
    one = resolve_precision(rules(), MODEL)
    same = [
        resolve_precision(rules(patterns=[("*", "bfloat16")], default=None), MODEL),
        resolve_precision(rules(), MODEL[::-1]),
    ]
    other = [
        resolve_precision(rules({"norm": "float16"}), MODEL),
        resolve_precision(rules(), [evolve(MODEL[0], shape=(1001, 256)), *MODEL[1:]]),
        resolve_precision(rules(), MODEL[:-1]),
        resolve_precision(rules(), MODEL, ActivationPrecision(middle="int8")),
        resolve_precision(rules(), MODEL, ActivationPrecision(last_tokens=17)),
    ]
    assert {len(one.fingerprint) for one in (*same, *other)} == {16}
    assert {two.fingerprint for two in same} == {one.fingerprint}
    assert len({two.fingerprint for two in (one, *other)}) == 1 + len(other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda found: found.update(version=2), "version 2"),
        (lambda found: found.pop("modules"), "no precision map.*modules"),
        (lambda found: found["modules"][1].update(precision="int4"), "input_layernorm: int4 is for matrices"),
        (lambda found: found["modules"][0].update(precision="int1"), "embed_tokens: precision 'int1' is not known"),
        (lambda found: found["modules"][0].update(shape=[]), "embed_tokens: shape .* is no weight's"),
        (lambda found: found["modules"][0].update(shape=5), "no precision map"),
        (lambda found: found["activations"].update(middle="int4"), "middle='int4'"),
        (lambda found: found["activations"].update(more=1), "no precision map.*more"),
        (lambda found: found["modules"].append(found["modules"][0]), "named 2 times"),
    ],
)
def test_a_record_that_was_changed_is_refused(change: Any, named: str) -> None:
    """JSON that is no map, or one that cannot be, is a ConfigError that says what is wrong."""
    found = json.loads(resolve_precision(rules(), MODEL).to_json())
    change(found)
    with pytest.raises(ConfigError, match=named):
        ResolvedMap.from_json(json.dumps(found))
    with pytest.raises(ConfigError, match="no precision map"):
        ResolvedMap.from_json("[1")


def test_bytes_are_counted_with_scales() -> None:
    """A matrix of 256 x 640 takes 4 bits a weight and 2 bytes per group; a bias 2 bytes a number; sums add up."""
    found = resolve_precision(resolve("precision", "asymmetric").rules(MODEL), MODEL)
    sizes = {one.module.name: one.weight_bytes for one in found.modules}
    assert sizes["layers.0.mlp.down_proj"] == 256 * (320 + 5 * 2)
    assert sizes["layers.0.mlp.up_proj.bias"] == 1280
    assert sizes["embed_tokens"] == 1000 * 512
    assert found.weight_bytes == sum(sizes.values())
    assert PRECISIONS["int8"].weight_bytes((3, 5)) == 3 * (5 + 2)
    assert PRECISIONS["int5"].weight_bytes((2, 64)) == 2 * (40 + 4)
    assert PRECISIONS["float32"].weight_bytes((7,)) == 28


def test_the_table_is_aligned_and_adds_up() -> None:
    """The table has a line per module, and per precision its modules and bytes, in columns."""
    found = resolve_precision(resolve("precision", "asymmetric").rules(MODEL), MODEL)
    modules, sums, acts = found.table().split("\n\n")
    lines = modules.splitlines()
    assert len(lines) == 1 + len(MODEL)
    for name in ("kind", "shape", "precision", "rule"):
        at = lines[0].index(name)
        assert all(line[at - 1] == " " and line[at] != " " for line in lines)
    counted = {line.split()[0]: line.split()[1:3] for line in sums.splitlines()[1:]}
    assert counted["int4"] == ["2", f"{640 * (128 + 4) + 256 * 330:,}"]
    assert counted["all"] == ["9", f"{found.weight_bytes:,}"]
    assert acts == "activations: bfloat16"


# ---------------------------------------------------------------- policies


def test_the_default_map() -> None:
    """The asymmetric map keeps feed-forward matrices in groups of 128 at 4 bits and all else, biases too, at 16."""
    policy: Precision = resolve("precision", "asymmetric")
    found = resolve_precision(policy.rules(MODEL), MODEL)
    four = {one.module.name for one in found.modules if one.precision == "int4"}
    assert four == {"layers.0.mlp.up_proj", "layers.0.mlp.down_proj"}
    assert {one.precision for one in found.modules if one.module.name not in four} == {"bfloat16"}


@pytest.mark.parametrize(
    ("ffn", "inputs", "precision"),
    [
        ("int4", 576, "int4-g64"),
        ("int4", 96, "int4-g32"),
        ("int4", 100, "int8"),
        ("int4-g64", 96, "int4-g32"),
        ("int4-g32", 100, "int8"),
        ("int5", 100, "int8"),
        ("int8", 100, "int8"),
        ("bfloat16", 100, "bfloat16"),
    ],
)
def test_groups_shrink_to_what_fits(ffn: str, inputs: int, precision: str) -> None:
    """A feed-forward matrix whose inputs are no multiple of the group has smaller groups, or a scale per row."""
    modules = [ModuleView("layers.0.mlp.up_proj", "ffn", (4, inputs))]
    policy = resolve("precision", "asymmetric", {"ffn": ffn})
    assert resolve_precision(policy.rules(modules), modules).precision(modules[0].name) == precision


@pytest.mark.parametrize(("policy", "setting"), [("asymmetric", "ffn"), ("uniform", "weights")])
@pytest.mark.parametrize(("inputs", "precision"), [(128, "int4"), (576, "int4-g64"), (96, "int4-g32"), (100, "int8")])
def test_smaller_groups_are_told_or_refused(policy: str, setting: str, inputs: int, precision: str) -> None:
    """What does not fit has smaller groups and is told of, or is an error of a strict map."""
    modules = [ModuleView(f"layers.{at}.mlp.up_proj", "ffn", (4, inputs)) for at in range(3)]
    chosen = policy_named(policy, {setting: "int4"})
    found = resolved_by(chosen, modules)
    assert {one.precision for one in found.modules} == {precision}
    notes = smaller_groups(chosen, found)
    strict = policy_named(policy, {setting: "int4", "strict": True})
    if precision == "int4":
        assert notes == []
        assert resolved_by(strict, modules) == found or policy == "uniform"
    else:
        told = f"3 matrices have {precision}: {inputs} inputs are no multiple of 128, the group of int4"
        assert notes == [told]
        with pytest.raises(ConfigError, match=f"{inputs} inputs are not a multiple of int4's groups of 128"):
            resolved_by(strict, modules)


@pytest.mark.parametrize(
    ("name", "precision"), [("none", "bfloat16"), ("uniform-int4", "int4"), ("uniform-int8", "int8")]
)
def test_short_names(name: str, precision: str) -> None:
    """A short name is a uniform map; settings that it does not mean are set beside it."""
    found = resolved_by(policy_named(name), MODEL)
    assert {one.precision for one in found.modules if len(one.module.shape) == 2} == {precision}
    assert name in map_names()
    assert policy_named(name, {"vectors": "float16"}).vectors == "float16"


@pytest.mark.parametrize("weights", list(PRECISIONS))
def test_one_precision_for_all(weights: str) -> None:
    """The uniform map has one precision for all matrices, and keeps vectors as floats."""
    found = resolve_precision(resolve("precision", "uniform", {"weights": weights}).rules(MODEL), MODEL)
    for one in found.modules:
        matrix = len(one.module.shape) == 2
        assert one.precision == (weights if matrix or PRECISIONS[weights].kind == "float" else "bfloat16")


def test_custom_rules_are_settings() -> None:
    """Rules come as mappings or pairs, as a settings file has them, and keep their order."""
    settings = {
        "exact": {"lm_head": "float32"},
        "patterns": [["*.mlp.*_proj", "int4"], ["*.mlp.*", "float16"]],
        "default": "bfloat16",
        "activations": {"ends": "float16", "middle": "int8", "first_tokens": 4},
    }
    policy = resolve("precision", "custom", settings)
    assert policy.rules(MODEL) == rules({"lm_head": "float32"}, [("*.mlp.*_proj", "int4"), ("*.mlp.*", "float16")])
    assert resolve("precision", "custom", settings | {"patterns": dict(settings["patterns"])}) == policy
    assert policy.activation_precision() == ActivationPrecision("float16", "int8", first_tokens=4)
    assert resolve("precision", "custom", {"default": None}).rules(()).default is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"exact": ["a"]}, "exact"),
        ({"exact": {"a": "int3"}}, r"exact\['a'\]='int3'"),
        ({"patterns": "*"}, "patterns"),
        ({"patterns": ["ab"]}, "patterns: 'ab' is no pair"),
        ({"patterns": [["*", "int4", "int8"]]}, "no pair"),
        ({"patterns": [["", "int4"]]}, "is no pattern"),
        ({"patterns": {"*": 4}}, r"patterns\['\*'\]=4"),
        ({"default": "half"}, "default='half'"),
        ({"activations": {"middle": "int5"}}, "middle='int5'"),
        ({"activations": {"centre": "int8"}}, "activations.*centre"),
        ({"activations": 8}, "activations=8"),
    ],
)
def test_custom_rules_that_cannot_be_are_refused(wrong: dict[str, Any], named: str) -> None:
    """A malformed rule is a ConfigError that names it, before any model is there."""
    with pytest.raises(ConfigError, match=named):
        resolve("precision", "custom", wrong)


@pytest.mark.parametrize("name", list(KINDS["precision"]))
def test_built_in_maps_are_repeatable(name: str) -> None:
    """Each built-in map gives equal rules for equal modules, and every module a precision."""
    policy = resolve("precision", name)
    assert policy.rules(MODEL) == policy.rules(list(MODEL))
    found = resolve_precision(policy.rules(MODEL), MODEL, policy.activation_precision())
    assert [one.module for one in found.modules] == list(MODEL)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 100), st.integers(0, 140))
def test_activations_by_position(first: int, last: int, prompt: int, position: int) -> None:
    """The first and the last positions of a prompt, and all generated ones, are at the ends' precision."""
    acts = ActivationPrecision("bfloat16", "int8", first_tokens=first, last_tokens=last)
    middle = first <= position < prompt - last
    assert acts.at(position, prompt) == ("int8" if middle else "bfloat16")
    assert acts.place(position, prompt) == ("middle" if middle else "first" if position < first else "last")
