"""Attributes of optimizers in earlier versions of Keras.

When set, they do nothing; when read, they are not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from unisono._src.keras.private.optimizers import is_like_setting, list_dead_settings


def check_optimizer_attributes(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse attributes that older programs set, and that do nothing."""
    dead = list_dead_settings(optimizer)
    if not dead:
        return
    write = "Write optimizer.learning_rate = ..." if "lr" in dead[0] else "Delete the line, or give the attribute another name."
    raise AttributeError(
        f"optimizer.{dead[0]} was set, but {type(optimizer).__name__} has no such attribute: the line does nothing in Keras 3, and "
        f"training would go on as before. {write}"
    )


@contextlib.contextmanager
def explain_read_attributes() -> Iterator[None]:
    """Explain in a note what to write instead. It is for reads of such an attribute in the block."""
    try:
        yield
    except AttributeError as error:
        if isinstance(error.obj, keras.optimizers.Optimizer) and is_like_setting(error.name or "", ["learning_rate"]):
            write = (
                "a schedule of keras.optimizers.schedules"
                if error.name == "decay"
                else "optimizer.learning_rate, and float() for a number"
            )
            note = f"{type(error.obj).__name__} has no attribute {error.name!r} in Keras 3. Write {write}."
            if note not in getattr(error, "__notes__", []):  # a callback of fit in a scope is in two blocks
                error.add_note(note)
        raise
