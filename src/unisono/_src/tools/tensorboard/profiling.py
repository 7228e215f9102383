"""Profiles of some batches of a training, by JAX' profiler."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax

from unisono._src.keras.fit.steps_per_call import MOST_STEPS
from unisono._src.typing import UserObject

ProfileBatch: TypeAlias = int | str | Sequence[int]
"""Keras' argument: a batch, or the first and the last of several, also as "10,20"."""


class Profile:
    """The profile of one fit's batches from `first` to `last`. Numbers begin with 1, and 0 stands for no profile.

    Args:
        profile_batch: Keras' argument: a batch, or the first and the last of several.
        directory: The directory of the run. TensorBoard finds profiles in its plugins/profile.
    """

    def __init__(self, profile_batch: ProfileBatch, directory: str) -> None:
        self.first, self.last = parse_profile_batch(profile_batch)
        self._profile_batch = profile_batch
        self._directory = directory
        self._is_over = self.first == 0
        self._is_running = False
        self._annotation = contextlib.ExitStack()

    def count_steps_until_due(self, done: int) -> int:
        """Count the batches that the next call may take.

        After `done` batches it must not cross the beginning or the end of the profile.
        """
        if self._is_over or done >= self.last:
            return MOST_STEPS
        return self.last - done if done >= self.first - 1 else self.first - 1 - done

    def begin_batch(self, number: int, batch: int, wait: Callable[[], None]) -> None:
        """Start the profile if it begins with this batch.

        `wait` waits for the steps before, so that they are not in the profile.
        """
        if not self._is_over and not self._is_running and self.first <= number <= self.last:
            wait()
            with self._warn_of_errors("there is no profile"):
                options = jax.profiler.ProfileOptions()
                if sys.version_info < (3, 12):  # recording Python's functions may end the process there: keras-team/keras#20450
                    options.python_tracer_level = 0
                jax.profiler.start_trace(self._directory, profiler_options=options)
                self._is_running = True
        if self._is_running:
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation(f"Profiled batch {batch}", step_num=number))

    def end_batch(self, number: int, wait: Callable[[], None]) -> None:
        if self._is_running and number >= self.last:
            wait()
            self.stop()
        self._annotation.close()

    def stop(self) -> None:
        """Write the profile, even of fewer batches than asked for."""
        self._annotation.close()
        if self._is_running:
            self._is_running = False
            self._is_over = True
            with self._warn_of_errors("the profile was not written"):
                jax.profiler.stop_trace()

    def warn_if_missed(self, done: int) -> None:
        """Warn if a fit of `done` batches did not reach the profile."""
        if self.first > done:
            warnings.warn(
                f"profile_batch={self._profile_batch!r} asks for a profile from batch {self.first} on, and this fit had {done}, so that there is "
                f"none. Batches are counted over all epochs, from 1 on.",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _warn_of_errors(self, result: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # no reason to lose a training
            self._is_over = True
            error = f"{type(e).__name__} was raised: {e}".rstrip(".")
            warnings.warn(f"profile_batch={self._profile_batch!r}: {result}, because {error}.", stacklevel=4)


def parse_profile_batch(profile_batch: ProfileBatch) -> tuple[int, int]:
    """Parse Keras' argument into (first batch, last batch). Its older form "10,20" is accepted."""
    parts: UserObject = profile_batch.split(",") if isinstance(profile_batch, str) else profile_batch
    parts = parts if isinstance(parts, list | tuple) else (parts,)
    with contextlib.suppress(ValueError):
        parts = [int(part) if isinstance(part, str) else part for part in parts]
    if len(parts) in (1, 2) and all(isinstance(part, int) for part in parts):
        first = parts[0]
        last = parts[-1]
        if 0 < first <= last or 0 == first == last:
            return first, last
    raise ValueError(
        f"profile_batch is the number of a batch, a pair of the first and the last one, or 0 for no profile; received "
        f"{profile_batch!r}. Batches are counted over all epochs, from 1 on."
    )
