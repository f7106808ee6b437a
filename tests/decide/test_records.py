"""Records that are made fast are records like others."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from attrs import evolve, field, frozen
from attrs.exceptions import FrozenInstanceError

from kimicore.contracts import RowView
from kimicore.records import swift
from kimicore.requests import Tokens
from kimicore.types import BoundRow, RowPlan


@frozen
class Slow:
    """A frozen record as attrs makes it."""

    left: int
    right: str = "r"
    more: tuple[int, ...] = ()


@swift
@frozen(weakref_slot=False)
class Fast:
    """The same."""

    left: int
    right: str = "r"
    more: tuple[int, ...] = ()


@pytest.mark.parametrize("given", [{"left": 1}, {"left": 2, "more": (3,)}, {"left": 1, "right": "x", "more": (1, 2)}])
def test_a_fast_record_is_a_frozen_one(given: dict[str, Any]) -> None:
    """Fields, equality, hash, text, evolve, copies and pickles are those of a frozen class."""
    one, other = Fast(**given), Slow(**given)
    assert type(one) is Fast
    assert (one.left, one.right, one.more) == (other.left, other.right, other.more)
    assert one == Fast(**given) != evolve(one, left=9)
    assert hash(one) == hash(Fast(**given))
    assert repr(one) == repr(other).replace("Slow", "Fast")
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(FrozenInstanceError):
        one.left = 3  # type: ignore[misc]


def test_its_arguments_are_those_of_its_fields() -> None:
    """A missing or an unknown argument is a TypeError, and the names are in the signature."""
    assert list(inspect.signature(Fast).parameters) == ["left", "right", "more"]
    for wrong in ({}, {"left": 1, "wrong": 2}):
        with pytest.raises(TypeError):
            Fast(**wrong)


@pytest.mark.parametrize("record", [RowView, RowPlan, BoundRow, Tokens])
def test_the_engines_records_of_every_step_are_frozen(record: Any) -> None:
    """None of them lets a field be set."""
    names = [one.name for one in record.__attrs_attrs__]
    made = record(*range(len(names)))
    assert [getattr(made, name) for name in names] == list(range(len(names)))
    with pytest.raises(FrozenInstanceError):
        setattr(made, names[0], 1)


def test_other_classes_are_refused() -> None:
    """A class whose ``__init__`` does more than fill slots is a TypeError."""

    @frozen
    class WithWeakReferences:
        one: int

    @frozen(weakref_slot=False)
    class WithConverter:
        one: int = field(converter=int)

    @frozen(weakref_slot=False)
    class WithFactory:
        one: list[int] = field(factory=list)

    for wrong in (WithWeakReferences, WithConverter, WithFactory):
        with pytest.raises(TypeError, match=wrong.__name__):
            swift(wrong)
