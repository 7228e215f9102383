"""What a function finds around it, by its names."""

from __future__ import annotations

import collections
import functools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras

from unisono._src.checks.user_code.bytecode import globals_of, names_of
from unisono._src.distributed.replicated import Replicated, is_array

LIBRARIES = ("builtins", "jax", "jaxlib", "keras", "numpy", "unisono")
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
KERAS = (keras.Layer, keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)
COLLECTIONS = (list, tuple, dict, collections.deque)
MOST_ITEMS = 64
"""Of a list or a dict, to look at one by one."""


class Place(NamedTuple):
    """A name that a function, or one that it calls, uses for something outside of it."""

    path: str
    """As the code calls it."""
    holder: Mapping[Any, Any] | types.CellType
    name: Any
    holds_data: bool = True
    """Whether an array there may reach what is computed: not in a layer, metric or loss, whose arrays are its own affair."""

    @property
    def value(self) -> Any:
        return contents(self.holder) if isinstance(self.holder, types.CellType) else self.holder.get(self.name, Place)


def contents(cell: types.CellType) -> Any:
    """What a closure has there; the cell itself where nothing was assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def places(function: Callable[..., Any]) -> list[Place]:
    """Where a function finds what is not its own."""
    return list(_of_function(function, set()))


def runs_replicas(function: Callable[..., Any], strategy: type, datasets: tuple[type, ...]) -> bool:
    """Whether the function, or one that it calls, finds a distributed dataset by a name, or a strategy and the name of `run`."""
    found = [place.value for place in places(function)]
    if any(isinstance(value, datasets) for value in found):
        return True
    calls = {name for each in (function, *found) for name in names_of(getattr(each, "__func__", each))}
    return any(isinstance(value, strategy) for value in found) and bool(calls & {"run", "experimental_run_v2"})


def _of_function(function: Any, seen: set[int]) -> Iterator[Place]:
    if id(function) in seen:
        return
    if hasattr(function, "__wrapped__"):
        yield from _of_function(function.__wrapped__, seen)
    if isinstance(function, functools.partial):
        seen.add(id(function))
        yield from _of_function(function.func, seen)
        held = dict(enumerate(function.args)) | function.keywords
        yield from _in(held, held, "an argument of functools.partial", frozenset(), seen)
    elif isinstance(function, types.MethodType):
        yield from _of_object("self", function.__self__, names_of(function.__func__), seen)
        yield from _of_function(function.__func__, seen)
    elif not isinstance(function, types.FunctionType):
        yield from _of_object("self", function, frozenset(), seen)
    elif is_of_user(function.__module__):
        seen.add(id(function))
        names = names_of(function)
        yield from _in(function.__globals__, globals_of(function.__code__) & function.__globals__.keys(), "", names, seen)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from _at(Place(name, cell, name), names, seen)
        defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        yield from _in(defaults, defaults, f"a default of {function.__name__}", names, seen)


def _in(holder: Mapping[Any, Any], keys: Iterable[Any], where: str, names: frozenset[str], seen: set[int]) -> Iterator[Place]:
    for key in sorted(keys, key=str):
        yield from _at(Place(where or str(key), holder, key), names, seen)


def _at(place: Place, names: frozenset[str], seen: set[int]) -> Iterator[Place]:
    yield place
    yield from _of_value(place.path, place.value, names, seen)


def _of_value(path: str, value: Any, names: frozenset[str], seen: set[int]) -> Iterator[Place]:
    """`names` are those that the code uses: of an object, only attributes with such names are looked at."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial) or hasattr(value, "__wrapped__"):
        yield from _of_function(value, seen)
    elif isinstance(value, COLLECTIONS) and len(value) <= MOST_ITEMS and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            if not is_array(item):
                yield from _of_value(path, item, names, seen)
    elif isinstance(value, property):
        yield from _of_function(value.fget, seen)
    elif not isinstance(value, keras.Variable | Replicated | type) and not is_array(value):
        yield from _of_object(path, value, names, seen)


def _of_object(path: str, thing: Any, names: frozenset[str], seen: set[int]) -> Iterator[Place]:
    """Attributes of modules and of objects of the user's classes."""
    of = thing.__name__ if isinstance(thing, types.ModuleType) else type(thing).__module__
    slots = slots_of(thing)
    if not is_of_user(of) or id(thing) in seen or not (hasattr(thing, "__dict__") or slots):
        return
    seen.add(id(thing))
    held, names = Attributes(thing, slots) if slots else vars(thing), names | {"__call__"}
    if not isinstance(thing, types.ModuleType):
        methods, names = with_methods(type(thing), names)
        for holder, name in methods:
            yield from _at(Place(f"{path}.{name}", holder, name), names, seen)
    own = isinstance(thing, KERAS)
    for place in _in(held, names & held.keys(), "", names, seen):
        yield place._replace(path=f"{path}.{place.path}", holds_data=not own) if place.holder is held else place


class Attributes(Mapping[str, Any]):
    """Of an object with slots, as they are when they are asked for."""

    def __init__(self, thing: Any, slots: tuple[str, ...]) -> None:
        self._thing, self._slots = thing, slots

    def __getitem__(self, name: str) -> Any:
        held = getattr(self._thing, "__dict__", {})
        if name in held:
            return held[name]
        if name in self._slots and hasattr(self._thing, name):
            return getattr(self._thing, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from getattr(self._thing, "__dict__", {})
        yield from (name for name in self._slots if hasattr(self._thing, name))

    def __len__(self) -> int:
        return len(list(iter(self)))


def slots_of(thing: Any) -> tuple[str, ...]:
    found = [vars(of).get("__slots__", ()) for of in type(thing).__mro__ if is_of_user(of.__module__)]
    names = [name for slots in found for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def with_methods(kind: type, names: frozenset[str]) -> tuple[list[tuple[Mapping[str, Any], str]], frozenset[str]]:
    """(where the class and its bases keep what has these names, the names with those that such methods use)."""
    found, known, left = [], set(names), list(names)
    while left:
        name = left.pop()
        holder = next((vars(of) for of in kind.__mro__ if name in vars(of) and is_of_user(of.__module__)), None)
        if holder is not None:
            found.append((holder, name))
            method = holder[name]
            new = names_of(method.fget if isinstance(method, property) else method) - known
            known |= new
            left += new
    return found, frozenset(known)


@functools.lru_cache(maxsize=4096)
def is_of_user(module: str | None) -> bool:
    """Whether a module is no library's: what those keep is their own affair."""
    if module is None or module.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not any(file.startswith(path) for path in INSTALLED)
