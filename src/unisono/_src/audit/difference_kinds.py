"""The kinds of differences between two runs, by what differs, and the words for each."""

from __future__ import annotations

ROWS = "rows"
ENTRY = "entry"
GRADIENT = "gradient"
WEIGHT = "weight"
STATE = "state"
OPTIMIZER = "optimizer"
STEPS = "steps"
EXIT = "exit"

MADE_BY_STEP = (GRADIENT, WEIGHT, STATE, OPTIMIZER)
"""The kinds of what a step makes, in the order in which it makes them."""

KIND_WORDS = {
    ROWS: "the rows of the global batch",
    ENTRY: "the state before the step",
    GRADIENT: "the gradient",
    WEIGHT: "the weights after the step",
    STATE: "the state of layers after the step",
    OPTIMIZER: "the optimizer's state after the step",
    STEPS: "the number of steps",
    EXIT: "the exit code",
}
"""What differs, as reports say it."""
