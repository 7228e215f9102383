"""Going on in a source of batches where a training stopped: by its index, or by reading forward."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from unisono._src.data.global_batch import Position
from unisono._src.data.progress import Place, Size, digest_of, put

SAY_AFTER = 2.0
SAY_EVERY = 10.0


Item = tuple[int, int, Any]
"""(pass, number, batch)"""


def indexed(
    place: Place, begin: Callable[[int, int], Iterator[Item]], skip: Callable[[range], None], size: Callable[[], Size]
) -> Iterator[Item]:
    """The batches from the place on; the last one that was trained on is read again and compared.

    Args:
        place: Where to go on.
        begin: Gives the batches of a pass from one on.
        skip: Takes the source past some passes.
        size: Says how large the source is in the pass that it has come to.
    """
    pass_, number = place.position
    before = place.last[0] if place.last is not None else pass_
    skip(range(place.first_pass, before))
    check_size(place, size)
    if place.last is not None and place.digest is not None and place.digest.startswith("last "):
        check_last(place.last, place.digest, begin(*place.last))
    skip(range(before, pass_))
    return begin(pass_, number)


SAME_ROWS = (
    "Give fit or the dataset the same rows in the same order as before: the same arrays or files, and no shuffling of your own without a "
    "fixed seed."
)


def check_size(place: Place, size: Callable[[], Size]) -> None:
    now = size() if place.last is not None else {}
    other = [
        f"{place.size[what]} {what} then, {now[what]} now" for what in place.size if what in now and now[what] != place.size[what]
    ]
    if other and place.last is not None:
        raise ValueError(f"The data are not those of the checkpoint: pass {place.last[0]} had {', '.join(other)}. {SAME_ROWS}")


def check_last(position: Position, digest: str, items: Iterator[Item]) -> None:
    found = next(items, None)
    close = getattr(items, "close", None)
    if close is not None:
        close()
    if found is None or f"last {digest_of(found[2])}" != digest:
        what = "is missing" if found is None else "has other rows"
        raise ValueError(
            f"The data are not those of the checkpoint: batch {position[1]} of pass {position[0]} {what} now. {SAME_ROWS}"
        )


def streamed(place: Place, begin_pass: Callable[[int], Iterable[Item]], size: Callable[[], Size]) -> tuple[Iterator[Item], Any]:
    """(The batches from the place on, the digest of those before it), after all of them were read again from the first pass on."""
    pass_, number = place.position
    chain, say = hashlib.sha256(), Saying(place.position)

    def begin(pass_: int) -> Iterator[Item]:
        if place.last is not None and pass_ == place.last[0]:
            check_size(place, size)
        return iter(begin_pass(pass_))

    def read(items: Iterator[Item], most: int | None) -> Iterator[Item]:
        for _, _, batch in itertools.islice(items, most):
            put(chain, batch)
            say.one_more()
        return items

    for earlier in range(place.first_pass, pass_):
        read(begin(earlier), None)
    rest = read(begin(pass_), number)
    say.done()
    if place.digest is not None and place.digest.startswith("all ") and place.digest != f"all {chain.hexdigest()[:32]}":
        raise ValueError(
            f"The data are not those of the checkpoint: the batches up to batch {number} of pass {pass_} have other rows now, or come in "
            f"another order, than when they were trained on. A stream must give the same batches each time it is made: seed its "
            f"shuffling, and read the same files."
        )
    return rest, chain


class Saying:
    """Says what reading forward costs, where it takes a while."""

    def __init__(self, position: Position) -> None:
        self._to = f"batch {position[1]} of pass {position[0]}"
        self._count = 0
        self._since = time.perf_counter()
        self._next = self._since + SAY_AFTER

    def one_more(self) -> None:
        self._count += 1
        if time.perf_counter() > self._next:
            self._next = time.perf_counter() + SAY_EVERY
            print(f"Reading forward to {self._to}: {self._so_far()}.", file=sys.stderr)

    def done(self) -> None:
        if self._next > self._since + SAY_AFTER:
            print(
                f"Read forward to {self._to}: {self._so_far()}. Arrays, lists of batches, a keras.utils.PyDataset and a "
                f"grain.MapDataset have an index, and begin there at once.",
                file=sys.stderr,
            )

    def _so_far(self) -> str:
        return f"{self._count} batches in {time.perf_counter() - self._since:.0f} s"
