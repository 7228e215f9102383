"""Resuming a source of batches at a resume point. A source with an index begins there, a stream is read forward."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Protocol, TypeAlias

from unisono._src.engine.global_batch import Position
from unisono._src.keras.data.resume_point import Digest, ResumePoint, Size, digest_batch, update_digest
from unisono._src.typing import PyTree

SAY_AFTER = 2.0
"""Seconds of reading forward before the first message."""
SAY_EVERY = 10.0
"""Seconds between two messages."""


NumberedBatch: TypeAlias = tuple[int, int, PyTree]
"""(pass, number, batch)"""


class SkipPasses(Protocol):
    """Takes a source past some passes.

    `left` are passes whose end was not reached. `begun`: the source was told that the first one begins.
    """

    def __call__(self, passes: range, left: Container[int] = (), begun: bool = False) -> None: ...


def resume_indexed(
    place: ResumePoint,
    begin: Callable[[int, int], Iterator[NumberedBatch]],
    skip: SkipPasses,
    size: Callable[[], Size],
) -> Iterator[NumberedBatch]:
    """Resume a source with an index. The batch that was trained on last is read again and compared.

    The source is told of the begins and ends of passes as often as it was before: a PyDataset may change there.

    Args:
        place: The place to resume at.
        begin: (pass, number) to the batches of the pass from this number on. Tells the source that the pass begins.
        skip: Takes the source past passes.
        size: Returns the size of the source in its current pass.
    """
    pass_, number = place.position
    last_pass = place.last[0] if place.last is not None else pass_
    left = place.left_passes
    skip(range(place.first_pass, last_pass), left)
    check_size(place, size)
    if place.last is None or place.digest is None or not place.digest.startswith("last "):
        skip(range(last_pass, pass_), left)
        return begin(pass_, number)
    items = begin(*place.last)
    try:
        check_last(place.last, place.digest, items)
    except ValueError:
        close_reader(items)
        raise
    if place.last == (pass_, number - 1):
        return items  # check_last has read the batch that was trained on last
    close_reader(items)
    skip(range(last_pass, pass_), left, begun=True)
    return begin(pass_, number)


def close_reader(items: Iterator[NumberedBatch]) -> None:
    """Close a reader that reads ahead."""
    close = getattr(items, "close", None)
    if close is not None:
        close()


SAME_ROWS = (
    "Give fit or the dataset the same rows in the same order as before: the same arrays or files, and no shuffling of your own without a "
    "fixed seed."
)


def check_size(place: ResumePoint, size: Callable[[], Size]) -> None:
    """Refuse data whose size has changed since the resume point. The size of the last pass is compared."""
    now = size() if place.last is not None else {}
    differences = [
        f"{place.size[what]} {what} then, {now[what]} now" for what in place.size if what in now and now[what] != place.size[what]
    ]
    if differences and place.last is not None:
        raise ValueError(
            f"The data are not those of the checkpoint: pass {place.last[0]} had {', '.join(differences)}. {SAME_ROWS}"
        )


def check_last(position: Position, digest: str, items: Iterator[NumberedBatch]) -> None:
    """Refuse batches whose first one has another digest."""
    item = next(items, None)
    if item is None or f"last {digest_batch(item[2])}" != digest:
        what = "is missing" if item is None else "has other rows"
        raise ValueError(
            f"The data are not those of the checkpoint: batch {position[1]} of pass {position[0]} {what} now. {SAME_ROWS}"
        )


def resume_stream(
    place: ResumePoint, begin_pass: Callable[[int], Iterable[NumberedBatch]], size: Callable[[], Size]
) -> tuple[Iterator[NumberedBatch], Digest]:
    """Resume a stream by reading it forward from the first pass.

    The result has the batches from the resume point on, and the digest of those before it.
    """
    pass_, number = place.position
    left = place.left_passes
    digest = hashlib.sha256()
    report = ForwardReport(place.position)

    def begin(pass_: int) -> Iterator[NumberedBatch]:
        if place.last is not None and pass_ == place.last[0]:
            check_size(place, size)
        return iter(begin_pass(pass_))

    def read(items: Iterator[NumberedBatch], most: int | None) -> Iterator[NumberedBatch]:
        for _, _, batch in itertools.islice(items, most):
            update_digest(digest, batch)
            report.count_batch()
        return items

    for earlier in range(place.first_pass, pass_):
        read(begin(earlier), left.get(earlier))
    rest = read(begin(pass_), number)
    report.finish()
    if place.digest is not None and place.digest.startswith("all ") and place.digest != f"all {digest.hexdigest()[:32]}":
        raise ValueError(
            f"The data are not those of the checkpoint: the batches up to batch {number} of pass {pass_} have other rows now, or come in "
            f"another order, than when they were trained on. A stream must give the same batches each time it is made: seed its "
            f"shuffling (a torch DataLoader by generator=torch.Generator().manual_seed(0)), and read the same files. Earlier passes are read "
            f"forward without callbacks: what a callback sets for each epoch, as sampler.set_epoch(epoch), is not set then."
        )
    return rest, digest


class ForwardReport:
    """Messages about a reading forward that takes long."""

    def __init__(self, position: Position) -> None:
        self._target = f"batch {position[1]} of pass {position[0]}"
        self._count = 0
        self._since = time.perf_counter()
        self._next_message = self._since + SAY_AFTER

    def count_batch(self) -> None:
        self._count += 1
        if time.perf_counter() > self._next_message:
            self._next_message = time.perf_counter() + SAY_EVERY
            print(f"Reading forward to {self._target}: {self._describe()}.", file=sys.stderr)

    def finish(self) -> None:
        if self._next_message > self._since + SAY_AFTER:
            print(
                f"Read forward to {self._target}: {self._describe()}. Arrays, lists of batches, a keras.utils.PyDataset and a "
                f"grain.MapDataset have an index, and begin there at once.",
                file=sys.stderr,
            )

    def _describe(self) -> str:
        return f"{self._count} batches in {time.perf_counter() - self._since:.0f} s"
