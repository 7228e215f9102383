"""Reading that processes share: each batch is made in one of them, which sends it to the others.

Which one depends on the source alone. Of a source with an index the batches take turns, so that the processes make as many at a time as there
are processes. Of any other source a later batch cannot be made without the earlier ones, so process 0 makes all.

The first batch is made by each process, so that processes with other data are found, and every process knows what a batch looks like.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from unisono._src.engine.exchange.gather_bytes import get_byte_gatherer
from unisono._src.engine.global_batch import Position, as_global_batch, is_batch_array
from unisono._src.engine.observers.process_comparison import WHOLE_DATA, check_same_rows, describe_position
from unisono._src.keras.data.batch_messages import Answer, read_answer, write_answer
from unisono._src.keras.data.source_warnings import read_states
from unisono._src.placement import Placement
from unisono._src.processes.activity import get_activity
from unisono._src.typing import PyTree

Numbered = tuple[int, PyTree]
"""(number in the pass, batch)"""


class FirstFacts(NamedTuple):
    """What processes compare of a first batch."""

    has_batch: bool
    batches: int | None
    """The number of batches in a pass, if it is known."""
    structure: str
    digest: int
    has_index: bool
    draws: bool = False
    """Whether numbers are drawn for the batch. It may then be another one when it is made again."""


class Readable(Protocol):
    """What reads the batches of a pass."""

    @property
    def has_index(self) -> bool: ...

    @property
    def num_batches(self) -> int | None: ...

    def read(self, pass_: int, chosen: slice) -> Iterator[Numbered]: ...


class Wire:
    """The way of batches between the processes of a placement."""

    def __init__(self, placement: Placement) -> None:
        assert placement.processes is not None
        self.number = placement.processes.number
        self.processes = len(placement.processes.leads)
        self._gather = get_byte_gatherer(placement)
        self.has_carried_stream = False
        """Whether process 0 has read a stream alone. What other processes would read of their own may be behind it since then."""

    def swap(self, own: Answer, structure: jax.tree_util.PyTreeDef | None, positions: Callable[[int], Position]) -> list[Answer]:
        """Swap the answers of all processes. `positions` says which batch a process was asked for."""
        parts = self._gather(write_answer(own))
        return [
            own if process == self.number else read_answer(message, structure, positions(process), process)
            for process, message in enumerate(parts)
        ]


@functools.cache
def get_wire(placement: Placement) -> Wire:
    """Get the wire of a placement. All processes ask for it together."""
    return Wire(placement)


class SharedReading:
    """The reading of one source by the processes of a placement."""

    def __init__(self, placement: Placement, in_turns: bool = True) -> None:
        self._placement = placement
        self._structure: jax.tree_util.PyTreeDef | None = None
        """The structure of all batches; None before the first."""
        self._takes_turns = in_turns
        """Whether a batch seems to depend on its number alone, so that any process may make it, at any time."""

    @property
    def _wire(self) -> Wire:
        return get_wire(self._placement)

    def read(self, source: Readable, pass_: int, start: int) -> Iterator[Numbered]:
        """Read the batches of one pass from `start` on. Every process gets all of them."""
        if source.has_index and self._takes_turns:
            return self._read_in_turns(source, pass_, start)
        return self._read_stream(source, pass_, start)

    def _read_in_turns(self, source: Readable, pass_: int, start: int) -> Iterator[Numbered]:
        wire, only_first = self._wire, slice(start, start + 1, 1)
        own = take_first(source, pass_, only_first)
        if own.error is None and wire.number == wire.processes - 1:  # process 0 makes it once, as a single process does
            before = read_states()
            again = take_first(source, pass_, only_first)
            own = own._replace(facts=[*own.facts[:-1], again.facts != own.facts or read_states() != before])
        first = self._swap_first(own, (pass_, start))
        if first is None:
            return
        yield start, first
        begin = start + 1
        readers = wire.processes if self._takes_turns else 1
        reader = source.read(pass_, slice(begin + wire.number, None, readers)) if wire.number < readers else iter(())
        yield from self._read_rounds(reader, pass_, begin, readers)

    def _read_stream(self, source: Readable, pass_: int, start: int) -> Iterator[Numbered]:
        wire, begin = self._wire, start
        reader = source.read(pass_, slice(start, None, 1)) if self._structure is None or not wire.number else iter(())
        try:
            if self._structure is None:
                first = self._swap_first(take(reader, source), (pass_, start))
                if first is None:
                    return
                if wire.number:
                    close_reader(reader)
                    reader = iter(())
                begin += 1
                yield start, first
            yield from self._read_rounds(reader, pass_, begin, 1)
        finally:
            close_reader(reader)

    def _swap_first(self, own: Answer, position: Position) -> PyTree:
        """Swap what all processes have made of a first batch. The result is that of process 0; None if there is none."""
        wire = self._wire
        if own.batch is not None:
            self._structure = jax.tree.structure(own.batch, is_leaf=is_batch_array)
        answers = wire.swap(own._replace(batch=None) if wire.number else own, self._structure, lambda process: position)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        facts = [FirstFacts(*answer.facts) for answer in answers]
        refuse_other_lengths(facts, position)
        refuse_other_structures(facts, position)
        self._takes_turns &= facts[0].has_index and not any(one.draws for one in facts)
        compare = check_same_rows if self._takes_turns or not wire.has_carried_stream else warn_of_other_rows
        compare(np.array([(*position, one.digest) for one in facts]))
        wire.has_carried_stream |= not self._takes_turns
        return answers[0].batch

    def _read_rounds(self, reader: Iterator[Numbered], pass_: int, begin: int, readers: int) -> Iterator[Numbered]:
        """Read batches from `begin` on. In each round each of the first `readers` processes makes one."""
        try:
            for base in itertools.count(begin, readers):
                position = (pass_, base + self._wire.number)
                own = self._check_structure(take(reader) if readers == 1 else take_undrawn(reader, position), position)
                answers = self._wire.swap(own, self._structure, lambda process, base=base: (pass_, base + process))[:readers]
                for number, answer in enumerate(answers, base):
                    if answer.error is not None:
                        raise answer.error
                    if answer.batch is None:
                        refuse_more(answers[number - base :], (pass_, number))
                        return
                    yield number, answer.batch
        finally:
            close_reader(reader)

    def _check_structure(self, own: Answer, position: Position) -> Answer:
        """Turn a batch of another structure than the first one into an error, in all processes."""
        structure = self._structure if own.batch is None else jax.tree.structure(own.batch, is_leaf=is_batch_array)
        if structure == self._structure:
            return own
        return Answer(
            error=ValueError(
                f"{describe_position(position).capitalize()} has the structure {structure}, and the first one had {self._structure}. Where one "
                f"process reads a batch for all, every batch must have the same structure: the same tuples, lists and dicts."
            )
        )


def take(reader: Iterator[Numbered], source: Readable | None = None) -> Answer:
    """Take the next batch of a reader. With the source, also what processes compare."""
    try:
        with get_activity().report_busy("reading a batch"):
            item = next(reader, None)
        batch = None if item is None else item[1]
        return Answer(batch) if source is None else Answer(batch, facts=list(describe_first(batch, source)))
    except Exception as error:  # of the source, which is also asked for its number of batches; all processes raise it
        return Answer(error=error)


def take_undrawn(reader: Iterator[Numbered], position: Position) -> Answer:
    """Take the next batch where processes take turns. Global draws for it are an error, since one process alone would draw other numbers."""
    before = read_states()
    own = take(reader)
    if own.batch is None or read_states() == before:
        return own
    return Answer(
        error=ValueError(
            f"The dataset draws from a global generator, np.random or random, as it makes {describe_position(position)}, and did not draw for the "
            f"first batch of this pass. So processes take turns to make its batches, and would draw other numbers than one process does. Draw "
            f"from a generator that the number of the batch seeds, in __getitem__: np.random.default_rng((seed, index)). Or give batches that "
            f"process 0 reads for all, as a generator: (dataset[index] for index in range(len(dataset)))."
        )
    )


def take_first(source: Readable, pass_: int, only_first: slice) -> Answer:
    """Take one batch of a source with an index."""
    reader = source.read(pass_, only_first)
    try:
        return take(reader, source)
    finally:
        close_reader(reader)


def describe_first(batch: PyTree, source: Readable) -> FirstFacts:
    """Describe a first batch for the comparison: its dtypes and rows by a digest of 31 bits."""
    if batch is None:
        return FirstFacts(False, source.num_batches, "", 0, source.has_index)
    whole = as_global_batch(batch, is_cut=False)
    arrays = [(leaf.shape, str(leaf.source.dtype)) for leaf in whole.leaves]
    digest = zlib.crc32(str(arrays).encode(), whole.digest) >> 1
    return FirstFacts(True, source.num_batches, str(whole.structure), digest, source.has_index)


def close_reader(reader: Iterator[Numbered]) -> None:
    """Close a reader, with the workers of its pass."""
    close = getattr(reader, "close", None)
    if close is not None:
        close()


def warn_of_other_rows(words: np.ndarray) -> None:
    """Warn of processes whose own first batches differ. That of process 0 counts."""
    others = [process for process, digest in enumerate(words[:, 2].tolist()) if digest != words[0, 2]]
    if others:
        warnings.warn(
            f"Process {others[0]} would read other rows than process 0 here. Process 0 reads this stream for all. If each process has a shard of "
            f"its own, the rows of all others are left out: do not shard by process. If the stream goes on with what an earlier one has left, "
            f"as process 0 reads it, all is well.",
            stacklevel=2,
        )


def refuse_other_lengths(facts: Sequence[FirstFacts], position: Position) -> None:
    """Refuse processes of which some have come to the end of the pass, or know another number of batches."""
    lengths = [(one.has_batch, one.batches) for one in facts]
    other = next((process for process, length in enumerate(lengths) if length != lengths[0]), None)
    if other is not None:
        said = [describe_length(*lengths[process]) for process in (0, other)]
        raise ValueError(
            f"At {describe_position(position)} process 0 has {said[0]}, and process {other} {said[1]}: their data have other lengths. {WHOLE_DATA}"
        )


def refuse_other_structures(facts: Sequence[FirstFacts], position: Position) -> None:
    """Refuse processes whose first batches are other trees."""
    other = next((process for process, one in enumerate(facts) if one.structure != facts[0].structure), None)
    if other is not None:
        raise ValueError(
            f"{describe_position(position).capitalize()} has the structure {facts[0].structure} in process 0, and {facts[other].structure} in "
            f"process {other}. {WHOLE_DATA}"
        )


def describe_length(has_batch: bool, batches: int | None) -> str:
    if not has_batch:
        return "no more batch"
    return "a batch" if batches is None else f"{batches} batches"


def refuse_more(answers: Sequence[Answer], position: Position) -> None:
    """Refuse batches of other processes where one has come to the end."""
    if any(answer.batch is not None for answer in answers):
        raise ValueError(
            f"One process has no {describe_position(position)}, and another one has a later batch: their data have other lengths. {WHOLE_DATA}"
        )
