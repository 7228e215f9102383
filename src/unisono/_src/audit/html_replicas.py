"""The places where R changes a result, and the plot of rows by replica."""

from __future__ import annotations

from collections.abc import Sequence

from unisono._src.audit.audit_report import Coupling, ReplicaComparison, ReplicaRows
from unisono._src.audit.html_elements import Content, Markup, join_content, make_element, write_path
from unisono._src.audit.html_numbers import count_nouns
from unisono._src.audit.html_source import draw_source

MOST_REPLICAS = 64

PATTERN = make_element(
    "pattern",
    make_element("rect", width=6, height=6, class_="ground"),
    make_element("rect", width=3, height=6, class_="stripe"),
    id="hatched",
    width=6,
    height=6,
    patternUnits="userSpaceOnUse",
    patternTransform="rotate(45)",
)
"""Of rows that came before. Stripes are told from a plain bar without colours."""


def draw_comparison(comparison: ReplicaComparison, sources: dict[str, str]) -> Markup:
    """Return the comparison of R = 1 with R = n."""
    near = "within" if comparison.is_near else "beyond"
    verdict = (
        f"After the last step, weights of R = {comparison.replicas} differ from those of R = 1 by at most {comparison.distance:.2g} of a "
        f"variable's size: {near} the tolerance of {comparison.tolerance:.2g}."
    )
    return join_content(
        make_element("p", verdict),
        [draw_coupling(coupling, sources) for coupling in comparison.couplings],
        make_element("h3", "Weightings that are not exact") if comparison.weightings else None,
        make_element("ul", [make_element("li", text, class_="quoted") for text in comparison.weightings])
        if comparison.weightings
        else None,
        draw_rows(comparison.rows) if comparison.rows else None,
    )


def draw_coupling(coupling: Coupling, sources: dict[str, str]) -> Markup:
    name: Content = write_path(coupling.layer) if coupling.layer else "The loss, or a step of your own"
    return make_element(
        "section",
        make_element("h3", name, " ", make_element("span", str(coupling.cause), class_="tag")),
        make_element("p", coupling.why),
        draw_source(coupling.source, sources) if coupling.source else None,
        make_element("p", coupling.what_to_write) if coupling.what_to_write else None,
        class_="coupling",
    )


def draw_rows(replicas: Sequence[ReplicaRows]) -> Markup:
    """Return the figure of rows by replica. Replicas with duplicates or missing rows are shown first, where there are too many."""
    order = sorted(range(len(replicas)), key=lambda at: not (replicas[at].duplicates or replicas[at].missing))
    shown = [replicas[at] for at in sorted(order[:MOST_REPLICAS])]
    longest = max(1, *(replica.rows + replica.missing for replica in replicas))
    names = ("Replica", "", "Rows", "Duplicates", "Missing")
    head = make_element(
        "tr", [make_element("th", name, scope="col", class_="number" if at > 1 else None) for at, name in enumerate(names)]
    )
    left_out = len(replicas) - len(shown)
    return make_element(
        "figure",
        make_element("h3", "Rows by replica"),
        draw_keys(),
        make_element(
            "table",
            make_element("thead", head),
            make_element("tbody", [draw_replica(replica, longest) for replica in shown]),
            class_="rows",
        ),
        make_element("p", f"{count_nouns(left_out, 'more replica')} without duplicates and missing rows.", class_="note")
        if left_out
        else None,
    )


def draw_keys() -> Markup:
    """Return the legend of the bars, which holds the pattern that they are filled with."""
    kinds = (
        ("seen", "rows"),
        ("twice", "duplicates: rows that came before"),
        ("missing", "missing: rows that came to no replica"),
    )
    defined = make_element("defs", PATTERN)
    swatches = [
        make_element(
            "li",
            make_element(
                "svg",
                defined if at == 0 else None,
                make_element("rect", x=1, y=1, width=22, height=12, class_=kind),
                width=24,
                height=14,
                aria_hidden="true",
            ),
            name,
        )
        for at, (kind, name) in enumerate(kinds)
    ]
    return make_element("ul", swatches, class_="levels")


def draw_replica(replica: ReplicaRows, longest: int) -> Markup:
    once = replica.rows - replica.duplicates
    bars = [
        draw_bar(0, once, longest, "seen"),
        draw_bar(once, replica.duplicates, longest, "twice"),
        draw_bar(replica.rows, replica.missing, longest, "missing"),
    ]
    words = f"Replica {replica.replica}: {replica.rows} rows, {replica.duplicates} duplicates, {replica.missing} missing"
    numbers = (("Rows", replica.rows), ("Duplicates", replica.duplicates), ("Missing", replica.missing))
    return make_element(
        "tr",
        make_element("th", replica.replica, scope="row"),
        make_element("td", make_element("svg", make_element("title", words), bars, role="img", class_="bar")),
        [
            make_element("td", f"{number:,}", class_="number odd" if number and at else "number", data_label=name)
            for at, (name, number) in enumerate(numbers)
        ],
    )


def draw_bar(start: int, length: int, longest: int, kind: str) -> Markup | None:
    if length <= 0:
        return None
    return make_element(
        "rect", x=f"{100 * start / longest:.3f}%", width=f"{100 * length / longest:.3f}%", y=1, height=14, class_=kind
    )
