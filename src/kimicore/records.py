"""Frozen records that are made thousands of times a second."""

from __future__ import annotations

from typing import Any, TypeVar

from attrs import NOTHING, Factory, fields

__all__ = ["swift"]

Record = TypeVar("Record")


def swift(cls: type[Record]) -> type[Record]:
    """Return a frozen attrs class with an ``__init__`` that takes half the time.

    A frozen class fills its fields through ``object.__setattr__``, one call for each. Here an instance is, while it is
    filled, of a class with the same slots that is not frozen. All else (equality, hash, ``evolve``, copies, that nobody
    can set a field) stays as it is. The class has to be made with ``weakref_slot=False``, without converters,
    validators, factories or hooks, and of no other class with fields; raises TypeError where it is not.
    """
    own: Any = cls
    names = [one.name for one in fields(own)]
    plain = all(
        one.converter is None and one.validator is None and not isinstance(one.default, Factory) and one.init  # type: ignore[arg-type]
        for one in fields(own)
    )
    hooks = ("__attrs_pre_init__", "__attrs_post_init__")
    if not plain or any(hasattr(own, one) for one in hooks) or tuple(own.__slots__) != tuple(names):
        raise TypeError(f"{cls.__name__} is no plain frozen class with slots for its fields alone")
    twin = type(cls.__name__, (), {"__slots__": tuple(names)})
    defaults = {one.name: one.default for one in fields(own) if one.default is not NOTHING}
    given = [f"{name}=defaults[{name!r}]" if name in defaults else name for name in names]
    lines = [f"def __init__({', '.join(['self', *given])}):", "    set_class(self, '__class__', twin)"]
    lines += [f"    self.{name} = {name}" for name in names]
    lines.append("    self.__class__ = cls")
    scope = {"set_class": object.__setattr__, "twin": twin, "cls": cls, "defaults": defaults}
    exec("\n".join(lines), scope)  # as attrs does itself
    made: Any = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = own.__init__.__annotations__
    own.__init__ = made
    return cls
