"""A profile of some batches of a training, by JAX' profiler."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax

from unisono._src.fit.steps_per_call import MOST_STEPS


class Profile:
    """Of the batches from `first` to `last`, of one fit. Numbers begin with 1, and 0 stands for no profile.

    Args:
        profile_batch: Keras' argument: a batch, or the first and the last of several.
        directory: Where TensorBoard looks for it: in plugins/profile.
    """

    def __init__(self, profile_batch: Any, directory: str) -> None:
        self.first, self.last = first_and_last(profile_batch)
        self._given = profile_batch
        self._directory = directory
        self.begin_anew()

    def begin_anew(self) -> None:
        """For the next fit."""
        self._over = self.first == 0
        self._runs = False
        self._batch = contextlib.ExitStack()

    def steps_until_due(self, done: int) -> int:
        """How many batches may come at once behind so many, so that none goes over the beginning or the end."""
        if self._over or done >= self.last:
            return MOST_STEPS
        return self.last - done if done >= self.first - 1 else self.first - 1 - done

    def batch_begins(self, number: int, batch: int, wait: Callable[[], None]) -> None:
        """`wait` waits for what was started before, so that it is not in the profile."""
        if not self._over and not self._runs and self.first <= number <= self.last:
            wait()
            self._start()
        if self._runs:
            self._batch.enter_context(jax.profiler.StepTraceAnnotation(f"Profiled batch {batch}", step_num=number))

    def batch_ended(self, number: int, wait: Callable[[], None]) -> None:
        if self._runs and number >= self.last:
            wait()
            self.stop()
        self._batch.close()

    def stop(self) -> None:
        """Writes what there is."""
        self._batch.close()
        if not self._runs:
            return
        self._runs, self._over = False, True
        try:
            jax.profiler.stop_trace()
        except Exception as e:  # no reason to lose a training
            warnings.warn(f"profile_batch={self._given!r}: the profile was not written, because {said(e)}.", stacklevel=2)

    def warn_if_missed(self, done: int) -> None:
        """At the end of a fit of so many batches."""
        if self.first > done:
            warnings.warn(
                f"profile_batch={self._given!r} asks for a profile from batch {self.first} on, and this fit had {done}, so that there is "
                f"none. Batches are counted over all epochs, from 1 on.",
                stacklevel=2,
            )

    def _start(self) -> None:
        try:
            jax.profiler.start_trace(self._directory, profiler_options=options())
            self._runs = True
        except Exception as e:  # no reason to lose a training
            self._over = True
            warnings.warn(f"profile_batch={self._given!r}: there is no profile, because {said(e)}.", stacklevel=2)


def options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    if sys.version_info < (3, 12):  # recording Python's functions may end the process there: keras-team/keras#20450
        options.python_tracer_level = 0
    return options


def first_and_last(profile_batch: Any) -> tuple[int, int]:
    """Of what Keras takes, its older form "10,20" included."""
    parts: Any = profile_batch.split(",") if isinstance(profile_batch, str) else profile_batch
    parts = parts if isinstance(parts, list | tuple) else (parts,)
    with contextlib.suppress(ValueError):
        parts = [int(part) if isinstance(part, str) else part for part in parts]
    if len(parts) in (1, 2) and all(isinstance(part, int) for part in parts):
        first, last = parts[0], parts[-1]
        if 0 < first <= last or 0 == first == last:
            return first, last
    raise ValueError(
        f"profile_batch is the number of a batch, a pair of the first and the last one, or 0 for no profile; received "
        f"{profile_batch!r}. Batches are counted over all epochs, from 1 on."
    )


def said(error: Exception) -> str:
    return f"{type(error).__name__} was raised: {error}".rstrip(".")
