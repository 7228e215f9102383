"""Captures of a function: objects outside of it that it finds by names."""

from __future__ import annotations

import collections
import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import keras

from unisono._src.checks.user_code.bytecode import find_global_names, find_used_names
from unisono._src.distributed.replicated import Replicated, is_array
from unisono._src.typing import UserFunction, UserObject

LIBRARIES = ("builtins", "jax", "jaxlib", "keras", "numpy", "unisono")
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
KERAS = (keras.Layer, keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)
COLLECTION_TYPES = (list, tuple, dict, collections.deque)
MOST_ITEMS = 64
"""Items of a list or a dict that is looked at item by item; a longer one is not."""

Holder: TypeAlias = Mapping[Any, object]
"""Values by names or by positions."""


class Capture(NamedTuple):
    """A name that a function, or one that it calls, uses for something outside of it."""

    path: str
    """The expression by which the code finds it."""
    holder: Holder | types.CellType
    name: str | int
    holds_data: bool = True
    """Whether an array there may reach what is computed: not in a layer, metric or loss, whose arrays are its own affair."""

    @property
    def value(self) -> UserObject:
        return read_cell(self.holder) if isinstance(self.holder, types.CellType) else self.holder.get(self.name, Capture)


def read_cell(cell: types.CellType) -> UserObject:
    """Return the value of a closure's cell; the cell itself where nothing was assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def find_captures(function: UserFunction) -> list[Capture]:
    """Return the names by which a function finds what is outside of it."""
    return list(_walk_function(function, set()))


def can_run_replicas(function: UserFunction, strategy: type, datasets: tuple[type, ...]) -> bool:
    """Return whether the function, or one that it calls, finds a distributed dataset by a name, or a strategy and the name of `run`."""
    values = [capture.value for capture in find_captures(function)]
    if any(isinstance(value, datasets) for value in values):
        return True
    calls = {name for each in (function, *values) for name in find_used_names(getattr(each, "__func__", each))}
    return any(isinstance(value, strategy) for value in values) and bool(calls & {"run", "experimental_run_v2"})


def _walk_function(function: UserObject, seen: set[int]) -> Iterator[Capture]:
    if id(function) in seen:
        return
    if hasattr(function, "__wrapped__"):
        yield from _walk_function(function.__wrapped__, seen)
    if isinstance(function, functools.partial):
        seen.add(id(function))
        yield from _walk_function(function.func, seen)
        arguments = dict(enumerate(function.args)) | function.keywords
        yield from _walk_names(arguments, arguments, "an argument of functools.partial", frozenset(), seen)
    elif isinstance(function, types.MethodType):
        yield from _walk_object("self", function.__self__, find_used_names(function.__func__), seen)
        yield from _walk_function(function.__func__, seen)
    elif not isinstance(function, types.FunctionType):
        yield from _walk_object("self", function, frozenset(), seen)
    elif is_user_module(function.__module__):
        seen.add(id(function))
        names = find_used_names(function)
        yield from _walk_names(
            function.__globals__, find_global_names(function.__code__) & function.__globals__.keys(), "", names, seen
        )
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from _walk_capture(Capture(name, cell, name), names, seen)
        defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        yield from _walk_names(defaults, defaults, f"a default of {function.__name__}", names, seen)


def _walk_names(
    holder: Holder, keys: Iterable[str | int], where: str, names: frozenset[str], seen: set[int]
) -> Iterator[Capture]:
    for key in sorted(keys, key=str):
        yield from _walk_capture(Capture(where or str(key), holder, key), names, seen)


def _walk_capture(capture: Capture, names: frozenset[str], seen: set[int]) -> Iterator[Capture]:
    yield capture
    yield from _walk_value(capture.path, capture.value, names, seen)


def _walk_value(path: str, value: object, names: frozenset[str], seen: set[int]) -> Iterator[Capture]:
    """Yield the captures that a value leads to. Of an object, only attributes with `names`, which the code uses, are looked at."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial) or hasattr(value, "__wrapped__"):
        yield from _walk_function(value, seen)
    elif isinstance(value, COLLECTION_TYPES) and len(value) <= MOST_ITEMS and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            if not is_array(item):
                yield from _walk_value(path, item, names, seen)
    elif isinstance(value, property):
        yield from _walk_function(value.fget, seen)
    elif not isinstance(value, keras.Variable | Replicated | type) and not is_array(value):
        yield from _walk_object(path, value, names, seen)


def _walk_object(path: str, thing: object, names: frozenset[str], seen: set[int]) -> Iterator[Capture]:
    """Yield the attributes of a module, or of an object of a user's class."""
    module = thing.__name__ if isinstance(thing, types.ModuleType) else type(thing).__module__
    slots = find_slots(thing)
    if not is_user_module(module) or id(thing) in seen or not (hasattr(thing, "__dict__") or slots):
        return
    seen.add(id(thing))
    attributes = SlotAttributes(thing, slots) if slots else vars(thing)
    names = names | {"__call__"}
    if not isinstance(thing, types.ModuleType):
        methods, names = find_methods(type(thing), names)
        for holder, name in methods:
            yield from _walk_capture(Capture(f"{path}.{name}", holder, name), names, seen)
    is_of_keras = isinstance(thing, KERAS)
    for capture in _walk_names(attributes, names & attributes.keys(), "", names, seen):
        yield (
            capture._replace(path=f"{path}.{capture.path}", holds_data=not is_of_keras)
            if capture.holder is attributes
            else capture
        )


class SlotAttributes(Mapping[str, object]):
    """Attributes of an object with slots, read when they are asked for."""

    def __init__(self, thing: object, slots: tuple[str, ...]) -> None:
        self._thing = thing
        self._slots = slots

    def __getitem__(self, name: str) -> object:
        attributes = getattr(self._thing, "__dict__", {})
        if name in attributes:
            return attributes[name]
        if name in self._slots and hasattr(self._thing, name):
            return getattr(self._thing, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from getattr(self._thing, "__dict__", {})
        yield from (name for name in self._slots if hasattr(self._thing, name))

    def __len__(self) -> int:
        return len(list(iter(self)))


def find_slots(thing: object) -> tuple[str, ...]:
    slots_of_classes = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__ if is_user_module(kind.__module__)]
    names = [name for slots in slots_of_classes for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def find_methods(kind: type, names: frozenset[str]) -> tuple[list[tuple[Mapping[str, object], str]], frozenset[str]]:
    """Return the methods of a class and its bases that have these names, and the names together with those that such methods use.

    A method is given by the attributes of the class that has it, and its name.
    """
    methods = []
    known = set(names)
    left = list(names)
    while left:
        name = left.pop()
        holder = next((vars(base) for base in kind.__mro__ if name in vars(base) and is_user_module(base.__module__)), None)
        if holder is not None:
            methods.append((holder, name))
            method = holder[name]
            new = find_used_names(method.fget if isinstance(method, property) else method) - known
            known |= new
            left += new
    return methods, frozenset(known)


@functools.lru_cache(maxsize=4096)
def is_user_module(module: str | None) -> bool:
    """Return whether a module belongs to no library: what libraries keep is their own affair."""
    if module is None or module.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not any(file.startswith(path) for path in INSTALLED)
