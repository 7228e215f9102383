"""A script that is run while its lines are noted: python script_trace.py DIRECTORY SCRIPT ARGUMENTS.

Started by its path and with the standard library alone, so that the script finds a Python in which nothing was imported. What each line of
the user's assigns is noted by a digest, with the lines that make or assign variables of Keras, the lines that a step is called from, and the
equations of the programs. Two such traces show the first line whose values differ.
"""

from __future__ import annotations

import atexit
import collections
import hashlib
import json
import os
import runpy
import sys
import sysconfig
import threading
import types
from typing import Any

MOST_TIMES = 60
"""How often the values of one line are noted."""

DEPTH = 3
MOST_ITEMS = 200
MOST_BYTES = 1 << 20
NOT_OF_USERS = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
OWN_FILE = os.path.realpath(__file__)
OPAQUE = "?"
"""In place of the digest of a value whose content is not known."""

Place = tuple[str, int, str]
"""(file, line, function)"""


class ScriptTrace:
    """What a script has done."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.values: dict[Place, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        self.order: dict[Place, int] = {}
        """When each place came first."""
        self.times: collections.Counter[Place] = collections.Counter()
        self.variables: list[dict[str, Any]] = []
        """Variables of Keras that were made or assigned: path, action, the user's lines, and the step that comes next."""
        self.calls: dict[int, list[Place]] = {}
        """The user's lines from which a step was called, by its number."""
        self.programs: list[dict[str, Any]] = []
        self.step = 0
        self.rows: list[list[list[str]]] = []
        """By step and replica, digests of the rows."""
        self.trained: dict[int, Any] = {}
        """The steps that train, as Unisono keeps them, whose state is written at the end."""
        self.has_hooks = False

    def write(self) -> None:
        number = os.environ.get("UNISONO_PROCESS", "0")
        content = {
            "lines": [
                {"place": place, "order": order, "times": self.times[place], "values": self.values.get(place, {})}
                for place, order in self.order.items()
            ],
            "variables": self.variables,
            "calls": self.calls,
            "programs": self.programs,
            "layers": list_layers(),
            "rows": self.rows,
        }
        self.write_weights(number)
        with open(os.path.join(self.directory, f"trace-{number}.json"), "w", encoding="utf-8") as file:
            json.dump(content, file)

    def write_weights(self, process: str) -> None:
        """Write the weights as the last step has left them."""
        if self.trained:
            import numpy

            weights = {}
            for step in self.trained.values():
                weights |= read_weights(step)
            numpy.savez(os.path.join(self.directory, f"weights-{process}.npz"), **weights)

    def note(self, place: Place, changed: dict[str, str]) -> None:
        self.order.setdefault(place, len(self.order))
        self.times[place] += 1
        if self.times[place] <= MOST_TIMES:
            for name, value in changed.items():
                self.values[place][name].append(value)


class FrameTrace:
    """The lines of one call of a function of the user's."""

    def __init__(self, trace: ScriptTrace, frame: types.FrameType) -> None:
        self._trace = trace
        self._function = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        self._file = frame.f_code.co_filename
        self._line = frame.f_lineno
        self._returns = "handed" if frame.f_back is None or not is_of_user(frame.f_back.f_code.co_filename) else "return"
        self._before = describe_frame(frame)
        given = {name: value for name, value in self._before.items() if not name.startswith("self.")}
        trace.note((self._file, self._line, self._function), given)

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> FrameTrace:
        if event in ("line", "return"):
            now = describe_frame(frame)
            changed = {name: value for name, value in now.items() if self._before.get(name) != value}
            if event == "return" and argument is not None:
                changed[self._returns] = describe(argument)
            self._trace.note((self._file, self._line, self._function), changed)
            self._before = now
            self._line = frame.f_lineno
        return self


def describe_frame(frame: types.FrameType) -> dict[str, str]:
    """Return digests of the names that a frame may assign, with the attributes of `self`."""
    names = {name: describe(value) for name, value in frame.f_locals.items() if not name.startswith("__")}
    if frame.f_code.co_name != "<module>" and "self" in frame.f_locals:
        attributes = getattr(frame.f_locals["self"], "__dict__", {})
        names |= {f"self.{name}": describe(value, 1) for name, value in attributes.items() if is_told(name, value)}
        names.pop("self")
    return names


def is_told(name: str, value: Any) -> bool:
    """Return whether an attribute may say something: not what is private, and not methods that a library has put there."""
    return not name.startswith("_") and not callable(value)


def describe(value: Any, depth: int = 0) -> str:
    """Return a short digest of a value; `OPAQUE` where it cannot be known."""
    try:
        return describe_known(value, depth)
    except Exception:  # of a class of the user's: a trace must not change what the script does
        return OPAQUE


def describe_known(value: Any, depth: int) -> str:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return shorten(f"{kind.__name__}:{value!r}")
    if kind.__name__ in ("ndarray", "ArrayImpl") or (kind.__module__ == "numpy" and hasattr(value, "dtype")):
        return describe_array(value)
    if depth >= DEPTH:
        return OPAQUE
    if kind in (list, tuple, collections.deque) or isinstance(value, tuple):
        return join(kind.__name__, [describe(item, depth + 1) for item in list(value)[:MOST_ITEMS]])
    if isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
        return join("dict", [describe(key, depth + 1) + describe(item, depth + 1) for key, item in items])
    if isinstance(value, (set, frozenset)):
        return "set" + join("set", sorted(describe(item, depth + 1) for item in list(value)[:MOST_ITEMS]))
    if isinstance(value, types.FunctionType):
        positions = tuple(value.__code__.co_positions()) if sys.version_info >= (3, 11) else value.__code__.co_code
        return shorten(f"function:{value.__code__.co_firstlineno}:{positions}")
    return describe_object(value, kind, depth)


def describe_object(value: Any, kind: type, depth: int) -> str:
    if kind.__name__ == "Generator" and hasattr(value, "bit_generator"):
        return shorten(repr(value.bit_generator.state))
    if kind.__name__ == "Random":
        return shorten(repr(value.getstate()))
    if hasattr(value, "stateless_call") or hasattr(value, "add_weight") or isinstance(value, (types.ModuleType, type)):
        return OPAQUE
    attributes = getattr(value, "__dict__", None)
    if not attributes or kind.__module__.startswith(("jax", "unisono", "concurrent", "threading")):
        return OPAQUE
    parts = [name + describe(item, depth + 1) for name, item in attributes.items() if not name.startswith("__")]
    return join(kind.__name__, [part for part in parts[:MOST_ITEMS] if not part.endswith(OPAQUE)])


def describe_array(value: Any) -> str:
    import numpy

    array = numpy.asarray(value)  # raises for an array that is being traced
    head = f"array:{array.dtype}:{array.shape}:"
    if array.dtype.hasobject:
        return shorten(head + repr(array.ravel()[:MOST_ITEMS].tolist()))
    flat = array.ravel()
    most = max(1, MOST_BYTES // max(1, array.itemsize))
    return (
        head
        + hashlib.blake2b(
            numpy.ascontiguousarray(flat[: most if flat.size > most else None]).tobytes(), digest_size=8
        ).hexdigest()
    )


def join(name: str, parts: list[str]) -> str:
    if parts and all(part == OPAQUE for part in parts):
        return OPAQUE
    return shorten(f"{name}:{len(parts)}:{';'.join(parts)}")


def shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:24]}...{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def is_of_user(file: str) -> bool:
    """Return whether a file is the user's: not Python's, not of an installed package, not of Unisono."""
    path = os.path.realpath(file)
    return (
        not file.startswith("<")
        and path != OWN_FILE
        and not path.startswith(NOT_OF_USERS)
        and f"{os.sep}unisono{os.sep}" not in path
    )


def list_user_places(frame: types.FrameType | None) -> list[Place]:
    """Return the user's lines that are under way, the innermost first."""
    places: list[Place] = []
    while frame is not None:
        code = frame.f_code
        if is_of_user(code.co_filename):
            places.append((code.co_filename, frame.f_lineno, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))
        frame = frame.f_back
    return places


trace = ScriptTrace(sys.argv[1] if __name__ == "__main__" else "")
_is_user_file: dict[str, bool] = {}


def trace_calls(frame: types.FrameType, event: str, argument: Any) -> FrameTrace | None:
    """Trace a call, where the function is the user's."""
    file = frame.f_code.co_filename
    if file not in _is_user_file:
        _is_user_file[file] = is_of_user(file)
    if not trace.has_hooks and "unisono" in sys.modules and hasattr(sys.modules["unisono"], "MirroredStrategy"):
        trace.has_hooks = True
        add_hooks()
    return FrameTrace(trace, frame) if _is_user_file[file] else None


def add_hooks() -> None:
    """Have variables, steps and programs noted: once Unisono is imported, and with it Keras."""
    import keras

    from unisono._src.audit.program_trace import describe_program
    from unisono._src.record.program_recorder import ProgramRecorder
    from unisono._src.step.step import Step
    from unisono._src.xla.rewrite import rules

    stock_init = keras.Variable.__init__
    stock_assign = keras.Variable.assign
    stock_note = ProgramRecorder.note_steps
    stock_outputs = Step.outputs

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        note_variable(self, "made")

    def assign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        note_variable(self, "assigned")
        return stock_assign(self, value, *args, **kwargs)

    def note_steps(self: Any, batches: Any, digests: Any) -> None:
        trace.calls[trace.step] = list_user_places(sys._getframe(1))
        trace.rows += [digest_rows(batch, self._strategy.num_replicas_in_sync) for batch in batches]
        trace.step += len(batches)
        stock_note(self, batches, digests)

    def outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._recorder is not None:
            trace.trained[id(self)] = self
        return stock_outputs(self, *args, **kwargs)

    def observe(name: str, program: Any) -> None:
        if any(digest in name for digest in ("digest_state", "get_place", "put_first")):
            return
        equations = describe_program(program, is_of_user)
        trace.programs.append({"name": name, "step": trace.step, "equations": equations})

    keras.Variable.__init__ = init
    keras.Variable.assign = assign
    ProgramRecorder.note_steps = note_steps
    Step.outputs = outputs
    rules.trace_observers.append(observe)


def read_weights(step: Any) -> dict[str, Any]:
    """Return the weights of a step that trains, by path."""
    import numpy

    groups = [(kind, variables) for kind, variables in step._recorder._list_recorded() if kind != "gradient"]
    arrays = step._device_state[0].state
    return {
        variable.path.replace("/", "|"): numpy.asarray(array)
        for (kind, variables), group in zip(groups, arrays, strict=False)
        if kind == "weight"
        for variable, array in zip(variables, group, strict=True)
    }


def digest_rows(batch: Any, replicas: int) -> list[list[str]]:
    """Return, for each replica, a digest of each of its rows."""
    import numpy

    from unisono._src.data.global_batch import count_shard_rows

    arrays = [numpy.ascontiguousarray(leaf.array) for leaf in batch.leaves]
    rows = [
        hashlib.blake2b(b"".join(array[row].tobytes() for array in arrays), digest_size=6).hexdigest()
        for row in range(batch.rows)
    ]
    digests = iter(rows)
    return [[next(digests) for _ in range(count)] for count in count_shard_rows(batch, replicas)]


def note_variable(variable: Any, action: str) -> None:
    places = list_user_places(sys._getframe(2))
    path = getattr(variable, "path", None)
    if path is not None and places:
        trace.variables.append({"path": path, "action": action, "places": places, "step": trace.step})


def list_layers() -> list[dict[str, Any]]:
    """Return the names and paths of all layers that still live, and whether they are models."""
    import gc

    keras = sys.modules.get("keras")
    if keras is None:
        return []
    found = [item for item in gc.get_objects() if isinstance(item, keras.layers.Layer)]
    return [
        {
            "name": layer.name,
            "path": getattr(layer, "path", None) or layer.name,
            "class": type(layer).__name__,
            "is_model": isinstance(layer, keras.Model),
        }
        for layer in found
    ]


def main(words: list[str]) -> None:
    sys.path[0] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.abspath(words[0]))
    sys.argv = words[1:] if words[0] == "-m" else words
    atexit.register(trace.write)
    threading.settrace(trace_calls)
    sys.settrace(trace_calls)
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.settrace(None)


if __name__ == "__main__":
    main(sys.argv[2:])
