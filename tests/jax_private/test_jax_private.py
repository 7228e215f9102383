"""The private names of JAX that Unisono uses are still there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import pkgutil

import jax
import jaxlib.version
import pytest

import unisono._src.jax_private

CHECKED_VERSIONS = ("0.10.2",)
"""The versions of jax and jaxlib whose sources were read for the room `jax_private`."""

ROOM = pathlib.Path(unisono._src.jax_private.__file__).parent


def read_private_names(source: str) -> set[str]:
    """Return the names from private modules of JAX, and what is read from modules among them."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(("jax._src", "jax.interpreters", "jax.experimental"))
        for alias in node.names
    }
    read = {
        f"{imported[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
    }
    return read | {name for name in imported.values() if not any(longer.startswith(f"{name}.") for longer in read)}


def find_name(dotted: str) -> object:
    module, _, name = dotted.rpartition(".")
    try:
        return importlib.import_module(dotted)
    except ImportError:
        return getattr(find_name(module), name)


@pytest.mark.parametrize("file", [module.name for module in pkgutil.iter_modules([str(ROOM)])])
def test_private_names_are_there(file):
    names = read_private_names((ROOM / f"{file}.py").read_text())
    assert names
    gone = []
    for name in names:
        try:
            find_name(name)
        except AttributeError:
            gone.append(name)
    assert not gone, (
        f"jax {jax.__version__} has no {', '.join(gone)}, of which jax_private/{file}.py was written with jax {' and '.join(CHECKED_VERSIONS)}"
    )


def test_the_versions_are_checked():
    """With other versions, read what this room uses in the sources of JAX, run all tests, and add the version to `CHECKED_VERSIONS`."""
    assert jax.__version__ in CHECKED_VERSIONS
    assert jaxlib.version.__version__ in CHECKED_VERSIONS


def test_attributes_and_arguments_are_there():
    from jax._src import compiler, core, distributed, xla_bridge

    state = distributed.global_state
    assert all(hasattr(state, name) for name in ("num_processes", "process_id", "client", "service", "preemption_sync_manager"))
    assert {"num_replicas", "num_partitions", "device_assignment"} <= set(
        inspect.signature(compiler.get_compile_options).parameters
    )
    assert {"priority", "fail_quietly"} <= set(inspect.signature(xla_bridge.register_backend_factory).parameters)
    assert "convention" in inspect.signature(core.get_opaque_trace_state).parameters
    (equation,) = jax.make_jaxpr(jax.numpy.sin)(1.0).eqns
    with equation.ctx.manager:
        pass
