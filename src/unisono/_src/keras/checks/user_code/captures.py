"""Captures of a function: outside objects that it finds by names.

Its bytecode and its closure tell them.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import keras

from unisono._src.keras.replica.replicated import Replicated, is_array
from unisono._src.typing import UserFunction, UserObject

WITHOUT_SETTINGS = ("builtins", "jax", "jaxlib", "numpy", "unisono")
"""Libraries whose objects hold no settings of users."""
VALUE_TYPES = (bool, int, float, str, bytes)
"""Types of numbers and texts, which are compared by value."""
LIBRARIES = ("builtins", "jax", "jaxlib", "keras", "numpy", "unisono")
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
KERAS = (keras.Layer, keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)
COLLECTION_TYPES = (list, tuple, dict, collections.deque)
FUNCTION_TYPES = (types.FunctionType, types.MethodType, functools.partial)
MOST_ITEMS = 64
"""The most items of a list or a dict that is looked into."""


class Capture(NamedTuple):
    """A name that a function uses for something outside of it. Functions that it calls count too."""

    path: str
    """The expression by which the code finds it."""
    read: Callable[[], UserObject]
    """Reads the value that is there now; `Capture` where there is nothing."""
    holds_data: bool = True
    """Whether an array there may be data. An array in a layer, metric or loss is that object's own affair."""

    @property
    def value(self) -> UserObject:
        return self.read()


def capture_item(path: str, holder: Mapping[UserObject, object], key: object) -> Capture:
    return Capture(path, lambda: holder.get(key, Capture))


def capture_argument(path: str, thing: UserObject) -> Capture:
    return Capture(path, lambda: thing)


def read_cell(cell: types.CellType) -> UserObject:
    """The value of a closure's cell. The cell itself where nothing was assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def find_captures(function: UserFunction, arguments: Iterable[tuple[str, UserObject]] = ()) -> list[Capture]:
    """Find the names by which a function reaches outside objects.

    `arguments` are objects that it gets, with their names: their attributes are found by names as well, by this function and by
    those that it calls.
    """
    seen: set[int] = set()
    captures = list(_walk_function(function, seen))
    called = [capture.value for capture in captures if isinstance(capture.value, FUNCTION_TYPES)]
    users = [each for each in called if is_user_module(getattr(each, "__module__", ""))]
    names = frozenset[str]().union(*map(find_used_names, (function, *users)))
    for name, thing in arguments:
        captures += _walk_capture(capture_argument(name, thing), names, seen)
    return captures


def can_run_replicas(function: UserFunction, strategy: type, datasets: tuple[type, ...]) -> bool:
    """Whether the function may call `strategy.run`.

    It, or a function that it calls, finds a distributed dataset by a name, or a strategy and the name of `run`.
    """
    values = [capture.value for capture in find_captures(function)]
    if any(isinstance(value, datasets) for value in values):
        return True
    calls = {name for each in (function, *values) for name in find_used_names(each)}
    return any(isinstance(value, strategy) for value in values) and bool(calls & {"run", "experimental_run_v2"})


def _walk_function(function: UserObject, seen: set[int]) -> Iterator[Capture]:
    if id(function) in seen:
        return
    if is_wrapper(function):
        yield from _walk_function(function.__wrapped__, seen)
    if isinstance(function, functools.partial):
        seen.add(id(function))
        yield from _walk_function(function.func, seen)
        arguments = dict(enumerate(function.args)) | function.keywords
        yield from _walk_items(arguments, arguments, "an argument of functools.partial", find_used_names(function), seen)
    elif isinstance(function, types.MethodType):
        yield from _walk_object("self", function.__self__, find_used_names(function.__func__), seen)
        yield from _walk_function(function.__func__, seen)
    elif not isinstance(function, types.FunctionType):
        yield from _walk_object("self", function, frozenset(), seen)
    elif is_user_module(function.__module__):
        seen.add(id(function))
        names = find_used_names(function)
        global_names = find_global_names(function.__code__) & function.__globals__.keys()
        yield from _walk_items(function.__globals__, global_names, None, names, seen)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from _walk_capture(Capture(name, functools.partial(read_cell, cell)), names, seen)
        defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        yield from _walk_items(defaults, defaults, f"a default of {function.__name__}", names, seen)


def is_wrapper(value: object) -> bool:
    """Whether a value names the function that it wraps.

    An object of a user may raise anything for a name that it does not have.
    """
    try:
        return hasattr(value, "__wrapped__")
    except Exception:  # of the object's own __getattr__
        return False


def _walk_items(
    holder: Mapping[UserObject, object], keys: Iterable[str | int], where: str | None, names: frozenset[str], seen: set[int]
) -> Iterator[Capture]:
    """Yield the captures of these keys, called `where` or by the keys."""
    for key in sorted(keys, key=str):
        yield from _walk_capture(capture_item(where or str(key), holder, key), names, seen)


def _walk_capture(capture: Capture, names: frozenset[str], seen: set[int]) -> Iterator[Capture]:
    yield capture
    yield from _walk_value(capture.path, capture.value, names, seen)


def _walk_value(path: str, value: object, names: frozenset[str], seen: set[int]) -> Iterator[Capture]:
    """Yield the captures that a value leads to.

    Of an object, only attributes with `names`, which the code uses, are looked at.
    """
    if isinstance(value, FUNCTION_TYPES) or is_wrapper(value):
        yield from _walk_function(value, seen)
    elif isinstance(value, COLLECTION_TYPES) and len(value) <= MOST_ITEMS and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            if not is_array(item):
                yield from _walk_value(path, item, names, seen)
    elif isinstance(value, collections.UserDict | collections.UserList):
        yield from _walk_capture(Capture(path, lambda: value.data), names, seen)
    elif isinstance(value, property):
        yield from _walk_function(value.fget, seen)
    elif isinstance(value, type):
        yield from _walk_class(path, value, names, seen)
    elif not isinstance(value, keras.Variable | Replicated) and not is_array(value):
        yield from _walk_object(path, value, names, seen)


def _walk_class(path: str, kind: type, names: frozenset[str], seen: set[int]) -> Iterator[Capture]:
    """Yield the attributes with these names of a user's class. Its bases count too."""
    if id(kind) in seen or not is_user_module(kind.__module__):
        return
    seen.add(id(kind))
    methods, names = find_methods(kind, names)
    for holder, name in methods:
        yield from _walk_capture(capture_item(f"{path}.{name}", holder, name), names, seen)


def _walk_object(path: str, thing: object, names: frozenset[str], seen: set[int]) -> Iterator[Capture]:
    """Yield the attributes of a module or of a user's object. Of another object, those that are numbers or texts."""
    module = thing.__name__ if isinstance(thing, types.ModuleType) else type(thing).__module__
    if id(thing) in seen:
        return
    if not is_user_module(module):
        if module.partition(".")[0] not in WITHOUT_SETTINGS and not isinstance(thing, types.ModuleType):
            yield from _walk_settings(path, thing, names)
        return
    seen.add(id(thing))
    names = names | {"__call__"}
    if not isinstance(thing, types.ModuleType):
        methods, names = find_methods(type(thing), names)
        for holder, name in methods:
            yield from _walk_capture(capture_item(f"{path}.{name}", holder, name), names, seen)
    slots = find_slots(thing)
    attributes = getattr(thing, "__dict__", {})
    for name in sorted(names & (attributes.keys() | slots)):
        read = functools.partial(getattr, thing, name, Capture) if name in slots else capture_item("", attributes, name).read
        capture = Capture(f"{path}.{name}", read, holds_data=not isinstance(thing, KERAS))
        if capture.value is not Capture:
            yield from _walk_capture(capture, names, seen)


def _walk_settings(path: str, thing: object, names: frozenset[str]) -> Iterator[Capture]:
    """Yield a library object's attributes that are numbers or texts.

    A user may have put them there, as in a namespace of options.
    """
    attributes = getattr(thing, "__dict__", None)
    if isinstance(attributes, dict):
        for name in sorted(names & attributes.keys()):
            if isinstance(attributes[name], VALUE_TYPES):
                yield capture_item(f"{path}.{name}", attributes, name)


def find_slots(thing: object) -> set[str]:
    slots_of_classes = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__ if is_user_module(kind.__module__)]
    return {name for slots in slots_of_classes for name in ([slots] if isinstance(slots, str) else slots)}


def find_methods(kind: type, names: frozenset[str]) -> tuple[list[tuple[Mapping[str, object], str]], frozenset[str]]:
    """Find the methods with these names in a class and its bases. The names that such methods use are added to the names.

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
    """Whether a module belongs to no library. What libraries keep is their own affair."""
    if module is None or module.partition(".")[0] in LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not any(file.startswith(path) for path in INSTALLED)


@functools.lru_cache(maxsize=4096)
def find_global_names(code: types.CodeType) -> frozenset[str]:
    """Find the global names that code, and inner functions, use."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in loads}
    return frozenset(names).union(*(find_global_names(inner) for inner in find_inner_codes(code)))


@functools.lru_cache(maxsize=4096)
def find_code_names(code: types.CodeType) -> frozenset[str]:
    """Find all names that code, and inner functions, use. Strings count too, where the code sets attributes by them."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str)) if "setattr" in code.co_names else ()
    return frozenset(code.co_names).union(texts, *(find_code_names(inner) for inner in find_inner_codes(code)))


def find_inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def find_used_names(function: object) -> frozenset[str]:
    while isinstance(function, functools.partial):
        function = function.func
    function = function.__func__ if isinstance(function, types.MethodType) else function
    return find_code_names(function.__code__) if isinstance(function, types.FunctionType) else frozenset()
