"""The private names of JAX that Unisono uses are still there."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil

import jax
import numpy as np
import pytest

import unisono._src.programs.private
from unisono._src.engine.device_mesh import get_mesh
from unisono._src.programs.private import device_arrays, jaxprs

ROOM = pathlib.Path(unisono._src.programs.private.__file__).parent


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
    assert not gone, f"jax {jax.__version__} has no {', '.join(gone)}, for which jax_private/{file}.py was written"


def test_attributes_and_arguments_are_there():
    from jax._src import compiler, core, distributed, xla_bridge
    from jax._src.interpreters import pxla

    state = distributed.global_state
    assert all(hasattr(state, name) for name in ("num_processes", "process_id", "client", "service", "preemption_sync_manager"))
    assert {"num_replicas", "num_partitions", "device_assignment"} <= set(
        inspect.signature(compiler.get_compile_options).parameters
    )
    assert {"priority", "fail_quietly"} <= set(inspect.signature(xla_bridge.register_backend_factory).parameters)
    assert "convention" in inspect.signature(core.get_opaque_trace_state).parameters
    fields = {"device_list", "input_avals", "input_shardings", "output_avals", "output_shardings", "committed", "all_args_info"}
    assert fields <= {field.name for field in dataclasses.fields(pxla.UnloadedMeshExecutable)}
    (equation,) = jax.make_jaxpr(jax.numpy.sin)(1.0).eqns
    with equation.ctx.manager:
        pass


def test_arrays_over_devices_are_taken_apart_and_written():
    mesh = get_mesh(tuple(jax.devices()[:3]))
    rows = [np.full((2, 64), number, "float32") for number in range(3)]
    array = mesh.put_blocks(rows)
    assert (array.shape, array.sharding) == ((6, 64), mesh.by_device)
    assert [block.devices() for block in mesh.list_blocks(array)] == [{device} for device in mesh.devices]
    device_arrays.write_first_rows(mesh.list_blocks(array), np.full(64, 7, "float32"))
    np.testing.assert_array_equal(np.asarray(array)[:, 0], [7, 0, 7, 1, 7, 2])
    (lead,) = mesh.on_lead([mesh.put_everywhere(rows[1])])
    assert lead.devices() == {mesh.lead}
    np.testing.assert_array_equal(lead, rows[1])


def test_inputs_of_loops_are_counted_by_their_roles():
    def run(kernel, start, places):
        return jax.lax.scan(lambda state, place: ((state[0] @ kernel + place, state[1] + 1), state[0]), (start, 0), places)

    arrays = (jax.numpy.ones((2, 2)), jax.numpy.ones((3, 2)), jax.numpy.ones((5, 3, 2)))
    forward = [equation for equation in jax.make_jaxpr(run)(*arrays).eqns if equation.primitive.name == "scan"]
    assert [jaxprs.count_loop_inputs(equation.params) for equation in forward] == [(1, 2)]
    gradient = jax.make_jaxpr(jax.grad(lambda *inputs: run(*inputs)[1].sum()))(*arrays)
    for equation in gradient.eqns:
        if equation.primitive.name == "scan":
            same = sum(jaxprs.count_loop_inputs(equation.params))
            outside = [atom.aval.shape for atom in equation.invars]
            inside = [variable.aval.shape for variable in equation.params["jaxpr"].jaxpr.invars]
            assert outside == [*inside[:same], *((5, *shape) for shape in inside[same:])]


def test_a_program_with_constants_keeps_them():
    program = jax.make_jaxpr(lambda x: x * np.arange(3.0))(np.ones(3))
    assert jaxprs.close_program(program) is program


def test_traces_are_kept_by_the_axes_around_them():
    """So a function that is traced for one platform is traced again for another: see `rules.trace_for`."""
    traced = []

    def step(state, place):
        traced.append(place)
        return state + place, state

    for axis, times in (("cpu", 1), ("gpu", 2), ("cpu", 2)):
        jax.make_jaxpr(lambda x: jax.lax.scan(step, 0.0, x), axis_env=[(axis, 1)])(jax.numpy.ones(3))
        assert len(traced) == times
