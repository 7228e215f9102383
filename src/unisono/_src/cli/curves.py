"""The learning curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

History = Mapping[str, Sequence[float]]

COLOURS = {"": "#1f77b4", "val_": "#d95f02"}
ROWS = {"": "training", "val_": "held out"}
# Equal curves lie on top of each other: a wide pale line under a thin dark one shows both.
STYLES: tuple[dict[str, object], ...] = (
    {"linewidth": 6, "alpha": 0.3, "solid_capstyle": "round"},
    {"linewidth": 1.4, "linestyle": (0, (4, 2))},
)


def draw_curves(file: Path, title: str, histories: Mapping[str, History]) -> None:
    """Write loss and accuracy over the epochs of each named run as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # a picture, and no window, on machines with and without a screen
    figure.suptitle(title)
    for axes, quantity in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for style, (name, history) in zip(STYLES, histories.items(), strict=True):
            for prefix, colour in COLOURS.items():
                values = history[prefix + quantity]
                axes.plot(range(1, len(values) + 1), values, color=colour, label=f"{ROWS[prefix]}: {name}", **style)
        axes.set(xlabel="epoch", ylabel=quantity)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        if quantity == "accuracy":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        else:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)
