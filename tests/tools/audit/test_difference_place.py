"""Where two runs part is read from the details of their records: the row, the variable, the equation of the step's program."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from unisono._src.engine.state import get_step_count
from unisono._src.keras.record import run_details
from unisono._src.kernels import rewriting
from unisono._src.tools.audit.audit_report import Place
from unisono._src.tools.audit.difference_place import find_place
from unisono._src.tools.records import RunRecord, find_difference, read_run_record

ROWS = np.arange(24, dtype="float32").reshape(8, 3) / 24


class Scaled(layers.Layer):
    """Scales by a number of Python's, or by one that Python is asked for in the step."""

    def __init__(self, factor: float, is_asked: bool = False) -> None:
        super().__init__(name="scaled")
        self.factor = factor
        self.is_asked = is_asked

    def call(self, inputs: Any) -> Any:
        if self.is_asked:
            like = jax.ShapeDtypeStruct((), np.float32)
            return inputs * jax.pure_callback(lambda: np.float32(self.factor), like)
        return inputs * self.factor


@pytest.fixture(scope="module")
def details():
    """Details are recorded by programs that are made in here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(run_details.SWITCH, "1")
        run_details.get_details.cache_clear()
        noted = run_details.get_details()
        assert noted is not None
        yield
        rewriting.trace_observers.remove(noted.note_program)
    run_details.get_details.cache_clear()


def make_model(**scaled: Any) -> Any:
    keras.utils.set_random_seed(0)
    with un.OneDeviceStrategy(replicas=4).scope():
        model = keras.Sequential([keras.Input((3,)), Scaled(**scaled), layers.Dense(1, name="head")], name="net")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def train(model: Any, directory: pathlib.Path, rows: np.ndarray = ROWS) -> RunRecord:
    """Train a step, and return its record."""
    before = get_step_count().steps
    get_step_count().steps = 0
    model.fit(rows, ROWS[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[un.callbacks.Record(directory)])
    get_step_count().steps = before
    return read_run_record(directory)


@pytest.fixture(scope="module")
def plain(details, tmp_path_factory):
    """A model, its weights at the start, and the record of its first step."""
    model = make_model(factor=0.5)
    weights = model.get_weights()
    return types.SimpleNamespace(model=model, weights=weights, record=train(model, tmp_path_factory.mktemp("record") / "plain"))


def place_of(one: RunRecord, other: RunRecord) -> tuple[str, Place]:
    difference = find_difference(one, other, 1)
    assert difference is not None
    return difference.kind, find_place(one, [other], difference)


def test_rows_are_named_with_their_array_replica_and_values(plain, tmp_path):
    plain.model.set_weights(plain.weights)
    rows = ROWS.copy()
    rows[5, 1] = -1
    kind, place = place_of(plain.record, train(plain.model, tmp_path / "run", rows))
    assert kind == "rows"
    assert place == Place(array="[0]", row=5, replica=2, values=("0.625, 0.666666687, 0.708333313", "0.625, -1, 0.708333313"))


def test_variables_are_named_with_their_layer_and_values(plain, tmp_path):
    plain.model.set_weights([plain.weights[0], np.array([0.25], "float32")])
    kind, place = place_of(plain.record, train(plain.model, tmp_path / "run"))
    assert kind == "entry"
    assert place == Place("head", values=("0", "0.25"))


def test_variables_of_other_shapes_are_named_with_both(plain):
    (start,) = plain.record.starts
    step = start.steps[0]
    variables = [each._replace(shape=(7, 1)) if each.path.endswith("kernel") else each for each in step.program.variables]
    other = start._replace(steps={0: step._replace(program=step.program._replace(variables=variables))})
    kind, place = place_of(plain.record, plain.record._replace(starts=[other]))
    assert (kind, place) == ("entry", Place(values=("shape (3, 1)", "shape (7, 1)"), layer="head"))


def test_equations_are_named_with_their_layer_line_and_constants(plain, tmp_path):
    kind, place = place_of(plain.record, train(make_model(factor=0.75), tmp_path / "run"))
    assert kind == "gradient"
    assert (place.layer, place.equation, place.values) == (
        "scaled",
        "mul(float32[2,3], float32[]) -> float32[2,3]",
        ("0.5", "0.75"),
    )
    assert place.source is not None
    assert (place.source.file, place.source.text) == (__file__, "return inputs * self.factor")


def test_calls_of_python_are_named_where_programs_are_the_same(details, tmp_path):
    model = make_model(factor=0.5, is_asked=True)
    one = train(model, tmp_path / "one")
    kind, place = place_of(one, one._replace(starts=change_gradient(one)))
    assert kind == "gradient"
    assert (place.layer, place.equation) == ("scaled", "pure_callback() -> float32[]")


def change_gradient(record: RunRecord) -> Any:
    """Return the steps of a record with another gradient."""
    (start,) = record.starts
    step = start.steps[0]
    return [start._replace(steps={0: step._replace(digests=((1, 1), *step.digests[1:]))})]
