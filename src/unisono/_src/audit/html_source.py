"""A line of the user's, shown among the lines around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unisono._src.audit.audit_report import AuditReport, Source
from unisono._src.audit.html_elements import Markup, make_element

AROUND = 4
"""Lines shown before the line that is meant, and after it."""

LONGEST_FILE = 4_000_000
LONGEST_LINE = 400


def read_sources(report: AuditReport) -> dict[str, str]:
    """Return the texts of the files that a report names, by their names. A file that cannot be read is left out."""
    couplings = report.comparison.couplings if report.comparison else ()
    named = [report.difference.source] if report.difference else []
    named += [coupling.source for coupling in couplings]
    texts: dict[str, str] = {}
    for name in {source.file for source in named if source}:
        try:
            if Path(name).stat().st_size <= LONGEST_FILE:
                texts[name] = Path(name).read_text(errors="replace")
        except (OSError, ValueError):  # it is gone, is no file, or has a name that no file can have
            continue
    return texts


def draw_source(source: Source, texts: Mapping[str, str]) -> Markup:
    """Return the figure of a line; of the line alone where the file's text is not known or has changed since."""
    where = [make_element("code", f"{source.file}:{source.line}"), f", in {source.function}" if source.function else None]
    lines = [
        make_element(
            "span",
            make_element("span", number, class_="line-number", aria_hidden="true"),
            make_element("span", text[:LONGEST_LINE], class_="quoted"),
            "\n",
            class_="line meant" if number == source.line else "line",
        )
        for number, text in find_lines(source, texts.get(source.file, ""))
    ]
    return make_element("figure", make_element("figcaption", where), make_element("pre", lines, tabindex=0), class_="source")


def find_lines(source: Source, text: str) -> list[tuple[int, str]]:
    """Return the lines to show, with their numbers and without the space that all of them begin with."""
    lines = text.splitlines()
    if not (0 < source.line <= len(lines) and lines[source.line - 1].strip() == source.text.strip()):
        return [(source.line, source.text)]
    first = max(1, source.line - AROUND)
    shown = [line.expandtabs(4) for line in lines[first - 1 : source.line + AROUND]]
    indent = min((len(line) - len(line.lstrip()) for line in shown if line.strip()), default=0)
    return list(enumerate((line[indent:] for line in shown), first))
