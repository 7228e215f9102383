"""The full cross: layer families x precisions x optimizers x placements x sources of data, and a table of what was equal.

python tests/helpers/matrix.py [--out FOLDER] [--families A B ...] [--precisions ...] [--optimizers ...] [--replicas ...]

Each family in each precision is trained in a fresh process, two at a time: with each optimizer, for each R, on each number of
devices, from each source of data. For one optimizer and one R, the weights, the optimizer, the random state and the history of
all these must be equal to the bit. Writes `matrix.md`, the table, and `matrix.csv`, every fingerprint; exits with 1 where two
differ or a process fails.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import csv
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from processes import HERE, python

FAMILIES = (
    "conv", "attention", "lstm", "gru", "several_outputs", "one dimension", "two dimensions", "three dimensions", "normalizations",
    "attentions", "recurrent", "noise and batch statistics",
)  # fmt: skip
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")
PLACEMENTS = {8: (1, 2, 3, 4, 8), 6: (1, 2, 4, 6), 12: (1, 2, 4, 6)}
WITHOUT = {("attentions", "mixed_float16")}
"""Plain Keras does not train it either: JAX has no product on CPU that its dot_product_attention asks for (F16_F16_F32)."""
AT_ONCE, LIMIT = 2, 3600.0


class Training(NamedTuple):
    """One training, or what a trained model evaluates and predicts, and the digest of all that came out."""

    family: str
    precision: str
    optimizer: str
    replicas: int
    devices: int
    source: str
    fingerprint: str

    @property
    def kind(self) -> tuple[str, str, str, int, bool]:
        """All trainings of a kind must have one fingerprint."""
        return *self[:4], self.source == "evaluate and predict"


class Failed(NamedTuple):
    family: str
    precision: str
    why: str


def train(
    family: str, precision: str, optimizers: Sequence[str], placements: dict[int, Sequence[int]]
) -> list[Training] | Failed:
    """In a process of its own."""
    spec = {"family": family, "precision": precision, "optimizers": optimizers, "placements": placements}
    done = python(str(HERE / "train_matrix.py"), json.dumps(spec), timeout=LIMIT)
    if done.returncode:
        return Failed(family, precision, done.stderr.strip()[-2000:])
    return [Training(family, precision, *json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def different(trainings: Iterable[Training]) -> list[Training]:
    """Those whose fingerprint is not that of the first of their kind."""
    firsts: dict[object, str] = {}
    return [one for one in trainings if one.fingerprint != firsts.setdefault(one.kind, one.fingerprint)]


def table(trainings: Sequence[Training]) -> str:
    """Markdown: for each family, precision and R, how many trainings had the fingerprint of their kind, of how many."""
    replicas = list(dict.fromkeys(one.replicas for one in trainings))
    wrong = collections.Counter((one.family, one.precision, one.replicas) for one in different(trainings))
    whole = collections.Counter((one.family, one.precision, one.replicas) for one in trainings)
    lines = ["| layers | precision | " + " | ".join(f"R = {r}" for r in replicas) + " |", "| --- " * (2 + len(replicas)) + "|"]
    for family, precision in dict.fromkeys((one.family, one.precision) for one in trainings):
        cells = [f"{whole[key] - wrong[key]} of {whole[key]}" for key in ((family, precision, r) for r in replicas)]
        lines.append(f"| {family.replace('_', ' ')} | {precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def written(trainings: Sequence[Training], folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "matrix.md").write_text(table(trainings))
    with (folder / "matrix.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Training._fields, *trainings])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    parser.add_argument("--families", nargs="+", default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--replicas", nargs="+", default=list(PLACEMENTS), type=int, choices=PLACEMENTS)
    given = parser.parse_args()
    placements = {replicas: PLACEMENTS[replicas] for replicas in given.replicas}
    start, trainings, failures = time.monotonic(), [], []
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        cells = [cell for cell in itertools.product(given.families, given.precisions) if cell not in WITHOUT]
        for found in pool.map(lambda cell: train(*cell, given.optimizers, placements), cells):
            if isinstance(found, Failed):
                failures.append(found)
                print(f"{found.family}, {found.precision}: failed\n{found.why}", flush=True)
                continue
            trainings += found
            print(f"{(time.monotonic() - start) / 60:5.1f} min", *table(found).splitlines()[2:], flush=True)
    written(trainings, given.out)
    for one in different(trainings):
        print("different:", *one)
    print(f"{len(trainings)} trainings, {len(different(trainings))} of them different; {given.out / 'matrix.md'}")
    return 1 if failures or different(trainings) or not trainings else 0


if __name__ == "__main__":
    sys.exit(main())
