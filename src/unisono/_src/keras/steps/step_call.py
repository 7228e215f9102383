"""The call of a model's own step, Keras' or the user's.

It is `train_step(state, data)`, `test_step` or `predict_step`.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from unisono._src.engine.row_counts import unwrap_batch
from unisono._src.engine.state import State
from unisono._src.keras.private.compiled_losses import forget_added_losses
from unisono._src.keras.private.models import make_crops_compilable
from unisono._src.typing import Array, Logs, Outputs, PyTree, UserObject, is_dict, is_list_or_tuple, is_tuple

METHODS = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}


def call_step(model: keras.Model, mode: str, state: State, batch: PyTree) -> UserObject:
    """Call the model's step. Losses of earlier traces are forgotten before it runs."""
    forget_added_losses(model)
    with make_crops_compilable(model):
        return getattr(model, METHODS[mode])(state, unwrap_batch(batch))


def run_predict_step(model: keras.Model, state: State, batch: PyTree) -> tuple[Outputs, list[Array]]:
    """Run a `predict_step`: (outputs, the non-trainable variables' values)."""
    returned = call_step(model, "predict", state, batch)
    is_pair = is_tuple(returned) and len(returned) == 2 and is_list_or_tuple(returned[1])
    if not (is_pair and len(returned[1]) == len(state[1])):
        what = f"a state of {len(returned[1])} arrays in place of {len(state[1])}" if is_pair else type(returned).__name__
        raise ValueError(
            f"predict_step must return outputs and state, as Keras' step on JAX does, and returned {what}. End it with: return outputs, "
            f"non_trainable_variables"
        )
    return returned[0], list(returned[1])


def check_result(returned: UserObject, mode: str, state: State) -> tuple[Logs | None, tuple[list[Array], ...]]:
    """Check that a step returned (logs, state). The groups of the state must be as long as before."""
    what = type(returned).__name__
    if is_tuple(returned) and len(returned) == 2 and is_list_or_tuple(returned[1]):
        groups = returned[1]
        sizes = [len(group) if is_list_or_tuple(group) else None for group in groups]
        expected = list(map(len, state))
        if sizes == expected:
            return returned[0], tuple(map(list, groups))
        what = f"groups of {format_sizes(sizes)} arrays as its state, in place of {format_sizes(expected)}"
    names = [
        "trainable_variables",
        "non_trainable_variables",
        *["optimizer_variables"] * (len(state) == 4),
        "metrics_variables",
    ]
    raise ValueError(
        f"{METHODS[mode]} must return logs and state, as Keras' steps on JAX do, and returned {what}. End it with: return logs, "
        f"({', '.join(names)})"
    )


def format_sizes(sizes: Sequence[int | None]) -> str:
    """Format the sizes of groups. None stands for what is no group."""
    return ", ".join("no" if size is None else str(size) for size in sizes)


def flatten_logs(logs: Logs) -> Logs:
    """Flatten logs as Keras' loops show them. `compile_metrics` nests them.

    >>> flatten_logs({"loss": 1, "compile_metrics": {"mae": 2}})
    {'loss': 1, 'mae': 2}
    """
    flat: Logs = {}
    for name, value in logs.items():
        flat |= flatten_logs(value) if is_dict(value) else {name: value}
    return flat
