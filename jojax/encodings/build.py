"""From `config.encoding` to a module: {name, transport, …options} -> a checked factory of the encoding's module."""

import dataclasses
import functools
import importlib
from collections.abc import Mapping

from flax.core import FrozenDict
from ml_collections import ConfigDict

from jojax.encodings.base import Dims, Encoding
from jojax.errors import UserError

INNER = {"dims", "dtype", "name", "parent"}


def load(name: str) -> type[Encoding]:
    """`name` is a module in jojax.encodings, or a dotted path to the user's own module (or module.Class).

    The encoding is the one Encoding subclass that the module defines."""
    path = name if "." in name else f"jojax.encodings.{name}"
    absent = UserError(
        f"encoding.name = {name!r}: no module {path}; name a file in jojax/encodings, or a dotted path to a module "
        "that Python finds (PYTHONPATH)"
    )
    if not all(part.isidentifier() for part in path.split(".")):
        raise absent
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the user's module exists, something that it imports does not
        head, _, tail = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(head), tail, None)
        except ModuleNotFoundError:
            found = None
        if isinstance(found, type) and issubclass(found, Encoding):
            return found
        raise absent from None
    own = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Encoding) and thing.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise UserError(f"encoding.name = {name!r}: {path} defines {len(own)} encodings; name one as {path}.Class")
    return own[0]


def options(cls) -> list[str]:
    """The option names of an encoding class."""
    return sorted(f.name for f in dataclasses.fields(cls) if f.name not in INNER)


def build(config: Mapping, dims: Dims, dtype="float32") -> functools.partial:
    """A factory: call it with `name='encoding'` inside a Linen module. Unknown options list the valid ones."""
    given = {k: FrozenDict(v) if isinstance(v, Mapping | ConfigDict) else v for k, v in dict(config).items()}
    given.pop("preset", None)  # a label for tables
    name = given.pop("name", None)
    if not isinstance(name, str) or not name:
        raise UserError("config.encoding has no name: give a module of jojax.encodings or a dotted path")
    cls = load(name)
    unknown = sorted(set(given) - set(options(cls)))
    if unknown:
        raise UserError(f"encoding.{unknown[0]} is not an option of {name!r}; it has: {', '.join(options(cls))}")
    make = functools.partial(cls, dims=dims, dtype=dtype, **given)
    made = make(parent=None)
    Encoding.check(made)  # also where a class of the user's forgets to
    for option, value in given.items():
        default = cls.__dataclass_fields__[option].default
        kinds = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
            raise UserError(f"encoding.{option} = {value!r}: needs a {type(default).__name__}, like {default!r}")
    made.check()
    return make
