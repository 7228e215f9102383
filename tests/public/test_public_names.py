"""What is public is documented, and the examples in the documentation run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import operator
import pathlib
import pkgutil
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import unisono as un
from unisono._src.processes import names

CLASSES = [
    *(
        getattr(un, name)
        for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "Strategy", "TPUStrategy")
    ),
    *(getattr(module, name) for module in (un.callbacks, un.ray) for name in module.__all__),
    un.Checkpoint,
]
FUNCTIONS = [
    un.compute_average_loss, un.export, un.fingerprint, un.function, un.get_replica_context, un.get_strategy, un.in_cross_replica_context,
    un.latest_checkpoint, un.load_exported, un.replicate, un.scale_regularization_loss, un.value_and_grad,
]  # fmt: skip
METHODS = [
    un.ray.Trainer.fit, un.Checkpoint.restore, un.Checkpoint.save, un.Checkpoint.saving_on_signal, un.Checkpoint.wait, un.Strategy.distribute_dataset,
    un.Strategy.distribute_datasets_from_function, un.Strategy.gather, un.Strategy.local_results, un.Strategy.memory, un.Strategy.reduce,
    un.Strategy.run, un.Strategy.scope,
]  # fmt: skip
OF_ANY_NAME = [un.Checkpoint, un.fingerprint]
"""Their arguments have no names, or names of the user's own."""

SOURCE = pathlib.Path(un.__file__).parent
PUBLIC = [name for name in un.__all__ if name not in ("callbacks", "ray")]
IN_MODULES = [f"{module}.{name}" for module in ("callbacks", "ray") for name in getattr(un, module).__all__]
MODULES = [m.name for m in pkgutil.walk_packages([str(SOURCE)], "unisono.") if "__main__" not in m.name]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    assert inspect.getdoc(getattr(un, name))


def test_the_public_names_are_these():
    """Adding one is a decision."""
    assert sorted(PUBLIC) == [
        "Checkpoint", "DeviceFaultError", "MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "ParameterServerStrategy",
        "ReduceOp", "Strategy", "TPUStrategy", "compute_average_loss", "export", "fingerprint", "function", "get_replica_context", "get_strategy",
        "in_cross_replica_context", "latest_checkpoint", "load_exported", "native", "replicate", "scale_regularization_loss", "value_and_grad",
    ]  # fmt: skip


def test_nothing_but_what_is_public_is_shown():
    """Internal modules are attributes of the package once they are imported."""
    assert un._src
    assert dir(un) == sorted([*un.__all__, "__version__"])
    assert dir(un.callbacks) == sorted(un.callbacks.__all__)
    assert dir(un.ray) == sorted(un.ray.__all__)


def test_help_says_what_is_public():
    """Python lists every module of a package, so that the text above has to say which are meant."""
    text, _, rest = pydoc.render_doc(un, renderer=pydoc.plaintext).partition("\nPACKAGE CONTENTS\n")
    shown = set(re.findall(r"[\w.]+", text.partition("Public is what follows")[2].partition("Example:")[0]))
    assert {*PUBLIC, *IN_MODULES} <= shown
    assert "internal and may change" in text
    described = rest.partition("CLASSES")[2]
    assert all(re.search(rf"\b{name}\b", described) for name in PUBLIC)


@pytest.mark.parametrize("call", [*CLASSES, *FUNCTIONS, *METHODS], ids=lambda call: call.__qualname__)
def test_every_argument_has_a_name_and_a_type(call):
    assert inspect.getdoc(call)
    signature = inspect.signature(call)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    assert all(parameter.annotation is not parameter.empty for parameter in parameters)
    assert signature.return_annotation is not signature.empty
    if call not in OF_ANY_NAME:
        assert not [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def described_arguments(call: Callable[..., object]) -> list[str]:
    """Return the arguments that a docstring describes; of a class without arguments of its own, those of its base class."""
    holders = call.__mro__ if inspect.isclass(call) else [call]
    sections = (re.search(r"^Args:\n((?: .*\n?|\n)*)", inspect.getdoc(holder) or "", re.MULTILINE) for holder in holders)
    return next((re.findall(r"^ {4}(\w+): \S", section[1], re.MULTILINE) for section in sections if section), [])


@pytest.mark.parametrize("call", [*CLASSES, *FUNCTIONS, *METHODS], ids=lambda call: call.__qualname__)
def test_every_argument_is_described(call):
    """In the order in which the call takes them, and nothing else."""
    assert described_arguments(call) == [name for name in inspect.signature(call).parameters if name != "self"]


def test_the_reference_shows_all_that_is_public():
    """Sphinx takes the texts from the docstrings; which names it takes them of stands in the page."""
    page = (SOURCE.parents[1] / "docs" / "api.md").read_text()
    shown = re.findall(r"^\.\. (?:auto|py:)(?:class|function|data|exception):: (?:unisono\.)?([\w.]+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted([*PUBLIC, *IN_MODULES])
    members = dict(re.findall(r"^\.\. autoclass:: (\w+)\n   :members: (.+)$", page, re.MULTILINE))
    for cls in (un.Strategy, un.Checkpoint):
        public = {name for name in vars(cls) if name[0] != "_" and not name.startswith("experimental_")}
        assert public - set(members[cls.__name__].split(", ")) == set()
    assert set(re.findall(r"^\.\. py:method:: Strategy\.(\w+)$", page, re.MULTILINE)) == {
        name for name in vars(un.Strategy) if name.startswith("experimental_")
    }


def test_the_reference_shows_every_variable_and_exit_code():
    page = (SOURCE.parents[1] / "docs" / "api.md").read_text()
    named = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"\"(UNISONO_\w+)\"", path.read_text())}
    assert {name for name in named if f"`{name}`" not in page} == set()
    assert all(f"| {code} |" in page for code in (names.LEFT_ON_REQUEST, names.LOST, names.STUCK))


def test_all_that_is_public_is_among_these():
    named = {call.__name__ for call in [*CLASSES, *FUNCTIONS]}
    assert {*PUBLIC, *un.callbacks.__all__, *un.ray.__all__} - named == {
        "DeviceFaultError",
        "ParameterServerStrategy",
        "ReduceOp",
        "native",
    }
    shown = {
        name
        for cls in (un.Strategy, un.Checkpoint, un.ray.Trainer)
        for name in vars(cls)
        if callable(getattr(cls, name)) and name[0] != "_"
    }
    older = {"experimental_distribute_dataset", "experimental_local_results", "experimental_run_v2"}
    assert shown - older == {method.__name__ for method in METHODS}


@pytest.mark.parametrize("cls", [un.MirroredStrategy, un.OneDeviceStrategy, un.TPUStrategy])
def test_editors_show_what_a_strategy_takes(cls):
    """By name alone, and with types."""
    signature = inspect.signature(cls)
    assert {name: parameter.default for name, parameter in signature.parameters.items()} == {
        "devices": None, "replicas": None, "accumulate": None, "deterministic": True, "verify": None,
        "shard": None,
    }  # fmt: skip
    assert {parameter.kind for parameter in signature.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    of_processes = inspect.signature(un.MultiWorkerMirroredStrategy).parameters
    assert list(of_processes) == ["coordinator", "processes", "process", *signature.parameters]


def test_type_checkers_find_misspelt_arguments(tmp_path):
    """As an editor does, from the lines that users write."""
    program = """
import unisono as un
un.MirroredStrategy(devices=2, replicas=4)
un.MirroredStrategy(device=2)  # wrong
un.MirroredStrategy(2)  # wrong
un.MultiWorkerMirroredStrategy(replica=2)  # wrong
un.OneDeviceStrategy().distribute_dataset([], batchsize=3)  # wrong
un.callbacks.TensorBoard(logdir="logs")  # wrong
def double(x: int) -> int: return 2 * x
doubled: int = un.function(double)(2)
doubled = un.function(eager=True)(double)(2)
un.function(double)("2")  # wrong
un.function(eagerly=True)  # wrong
un.value_and_grad(lambda: 0.0, [], hasaux=True)  # wrong
loss, gradients = un.value_and_grad(lambda: 0.0, [])
(loss, rest), gradients = un.value_and_grad(lambda: (0.0, 1), [], has_aux=True)
(loss, rest, more), gradients = un.value_and_grad(lambda: (0.0, 1), [], has_aux=True)  # wrong
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    found = {diagnostic["range"]["start"]["line"] for diagnostic in json.loads(done.stdout)["generalDiagnostics"]}
    assert found == {number for number, line in enumerate(program.splitlines()) if line.endswith("# wrong")}


def test_type_checkers_see_the_public_names_where_they_come_from():
    """They read imports that are never run."""
    seen = {}
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            seen |= {alias.asname: node.module for alias in node.names if alias.asname and not alias.asname.startswith("_")}
    assert {seen.pop("callbacks"), seen.pop("ray")} == {"unisono"}
    assert seen == {name: f"unisono._src.{module}" for name, module in un._MODULES.items()}
    assert set(un.__all__) == {"callbacks", "ray", *seen}


@pytest.mark.parametrize("name", IN_MODULES)
def test_every_name_of_a_module_is_documented(name):
    assert inspect.getdoc(operator.attrgetter(name)(un))


def test_the_examples_in_the_documentation_run():
    """Of all modules in one test: most of them have none."""
    found = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert sum(of.attempted for of in found.values()) > 10
    assert [name for name, of in found.items() if of.failed] == []
