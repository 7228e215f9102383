"""What a function finds around it, by its names: arrays that reach replica code without being arguments, and what may change."""

from __future__ import annotations

import collections
import dis
import functools
import io
import itertools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import keras
from jax.core import Tracer

from unisono.loop.arguments import Replicated, is_array

LIBRARIES = ("builtins", "jax", "jaxlib", "keras", "numpy", "unisono")
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
NUMBERS = (bool, int, float, str, bytes)
KERAS = (keras.Layer, keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)
SIZES = ("shape", "ndim", "size", "dtype")
COLLECTIONS = (list, tuple, dict, collections.deque)
MOST_ITEMS_IN_LISTS = 1024
MOST_ITEMS = 64
"""Of a list or a dict, to look at one by one."""


class Place(NamedTuple):
    """A name that a function, or one that it calls, uses for something outside of it."""

    path: str
    """As the code calls it."""
    holder: Mapping[Any, Any] | types.CellType
    name: Any
    holds_data: bool = True
    """Whether an array there may reach what is computed: not where the code asks for its size alone, nor in a layer, metric or loss,
    whose arrays are its own affair."""

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


class Surroundings:
    """What stood in these places when a function was traced: what is put there later would not be seen."""

    def __init__(self, function: Callable[..., Any], before: Surroundings | None = None) -> None:
        """`before` is how it was before the trace: lists and dicts into which the code itself puts something, as code that counts its
        traces does, are not looked into."""
        self._own: list[Any] = []
        if before is not None:
            changed = [then.thing for _, then in before._then if isinstance(then, Kept) and not is_same(then.thing, then)]
            self._own = [*before._own, *changed]
        self._then = [(place, kept(place.value, frozenset(map(id, self._own)))) for place in places(function)]

    @property
    def unchanged(self) -> bool:
        return all(is_same(place.value, then) for place, then in self._then)


def runs_replicas(function: Callable[..., Any], strategy: type, datasets: tuple[type, ...]) -> bool:
    """Whether the function, or one that it calls, finds a distributed dataset by a name, or a strategy and the name of `run`."""
    found = [place.value for place in places(function)]
    if any(isinstance(value, datasets) for value in found):
        return True
    calls = {name for each in (function, *found) for name in names_of(getattr(each, "__func__", each))}
    return any(isinstance(value, strategy) for value in found) and bool(calls & {"run", "experimental_run_v2"})


class Kept(NamedTuple):
    """A list or a dict, and what was in it: code may put something else into it."""

    thing: Any
    items: Mapping[Any, Any]

    @property
    def size(self) -> int:
        return sum(of.size if isinstance(of, Kept) else 1 for of in self.items.values())


def kept(value: Any, around: frozenset[int]) -> Any:
    """`around` are the ids of those that are not looked into."""
    if not isinstance(value, COLLECTIONS) or len(value) > MOST_ITEMS or id(value) in around:
        return value
    found = Kept(value, {key: kept(item, around | {id(value)}) for key, item in items_of(value).items()})
    return found if found.size <= MOST_ITEMS else value  # it is looked through at every step


def items_of(thing: Any) -> Mapping[Any, Any]:
    return thing if isinstance(thing, dict) else dict(enumerate(thing))


def is_same(now: Any, then: Any) -> bool:
    if isinstance(then, Kept):
        items = items_of(now) if now is then.thing else {}
        return (
            now is then.thing
            and items.keys() == then.items.keys()
            and all(is_same(items[key], of) for key, of in then.items.items())
        )
    return now is then or (type(now) is type(then) and isinstance(now, NUMBERS) and now == then)


def arrays_around(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """(how the code calls it, an array) for each array that the function, or one that it calls, may find by a name, traced numbers
    among them."""
    return [
        (place.path, array) for place in places(function) if place.holds_data for array in arrays_in(place.value) if counts(array)
    ]


def replicated_around(function: Callable[..., Any]) -> list[Any]:
    """The arrays of what is found there and is meant to be the same for all."""
    found = [leaf for place in places(function) for leaf in leaves_in(place.value) if isinstance(leaf, Replicated)]
    return [array for replicated in found for array in jax.tree.leaves(replicated)]


def arrays_in(value: Any) -> Iterator[Any]:
    return (leaf for leaf in leaves_in(value) if is_array(leaf) and not isinstance(leaf, Replicated))


def leaves_in(value: Any) -> Iterator[Any]:
    """A value, or what is in it, however deep; of long lists some."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple | collections.deque | set):
        yield value
        return
    for item in itertools.islice(value, MOST_ITEMS_IN_LISTS):
        yield from leaves_in(item)


def may_hold_arrays(function: Callable[..., Any]) -> bool:
    """Whether the function finds arrays around, or something that may give it some."""
    return bool(arrays_around(function)) or any(place.holds_data and gives_items(place.value) for place in places(function))


def gives_items(value: Any) -> bool:
    """Iterators, and objects of the user's classes that have items."""
    kind = type(value)
    return isinstance(value, Iterator | keras.utils.PyDataset) or (hasattr(kind, "__getitem__") and is_of_user(kind.__module__))


def counts(array: Any) -> bool:
    return bool(len(array.shape)) or isinstance(array, Tracer)


def check_nothing_left(function: Callable[..., Any]) -> None:
    """After a trace: a value that stands for what will be computed must not have been kept anywhere."""
    for place in places(function):
        if any(isinstance(array, Tracer) for array in arrays_in(place.value)):
            raise ValueError(
                f"The function keeps a traced value in {place.path!r}, where Python would find no number in it, and the compiled function would "
                f"never put another. Return the value from the function, and keep what it returned."
            )


def check_iterators(function: Callable[..., Any]) -> None:
    """What a compiled function takes from an iterator it takes once, and has for good."""
    for place in places(function):
        if isinstance(place.value, Iterator) and not isinstance(place.value, io.IOBase):
            raise ValueError(
                f"The function finds the iterator {place.path!r} by its name. Compiled, it would take from it once, when it is traced, and "
                f"have the same in every call. Take from it outside, and pass what it gives as an argument: next({place.path})."
            )


def check_arguments(name: str, before: Any, after: Any) -> None:
    """Structures of a function's arguments: what it puts into a list or a dict among them would be lost."""
    if before != after:
        raise ValueError(
            f"The function {name!r} puts something into an argument, or takes something out of it, where nobody will find it when the "
            f"function is compiled. Return it instead."
        )


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
        sized = asked_for_size(function.__code__)
        for place in _in(function.__globals__, globals_of(function.__code__) & function.__globals__.keys(), "", names, seen):
            yield place._replace(holds_data=place.holds_data and not (place.path == place.name and place.name in sized))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            for place in _at(Place(name, cell, name), names, seen):
                yield place._replace(holds_data=place.holds_data and not (place.path == name and name in sized))
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


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """The global names that code uses, and the functions inside it."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(found).union(*(globals_of(inner) for inner in codes_in(code)))


@functools.lru_cache(maxsize=4096)
def asked_for_size(code: types.CodeType) -> frozenset[str]:
    """The names outside of code of which it reads nothing but a size: `len(rows)`, `rows.shape`."""
    sized, read = set(), set()
    for of in (code, *codes_within(code)):
        found = [i for i in dis.get_instructions(of) if i.opname not in PADDING]
        for before, now, after in zip([None, *found], found, [*found[1:], None], strict=False):
            if now.opname not in LOADS:
                continue
            by_attribute = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval in SIZES
            by_len = before is not None and before.argval == "len" and after is not None and after.opname.startswith("CALL")
            (sized if by_attribute or by_len else read).add(now.argval)
    return frozenset(sized - read)


LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
PADDING = ("CACHE", "PRECALL", "PUSH_NULL", "COPY_FREE_VARS", "MAKE_CELL")


def codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in codes_in(code):
        yield inner
        yield from codes_within(inner)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names that code uses, and the functions inside it; texts too, where it sets attributes by them."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str)) if "setattr" in code.co_names else ()
    return frozenset(code.co_names).union(texts, *(names_in(inner) for inner in codes_in(code)))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def names_of(function: Any) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else names_in(code)
