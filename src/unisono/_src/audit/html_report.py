"""The report of an audit as one HTML page, which opens without a network: the verdict, the finding, plots, and what was run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from unisono._src.audit.audit_report import AuditedRun, AuditReport, Difference, Divergence
from unisono._src.audit.difference_kinds import EXIT, KIND_WORDS
from unisono._src.audit.html_curves import Curve
from unisono._src.audit.html_divergence import draw_divergence, draw_levels, has_difference
from unisono._src.audit.html_elements import Content, Markup, make_element, raw_style, write_path
from unisono._src.audit.html_losses import draw_losses
from unisono._src.audit.html_numbers import NOTHING, count_nouns, write_seconds
from unisono._src.audit.html_replicas import draw_comparison
from unisono._src.audit.html_source import draw_source
from unisono._src.audit.html_style import STYLE
from unisono._src.audit.html_verdict import decide_verdict

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Browsers load nothing for the page and run no code in it, whatever stands in a name."""

MOST_VARIABLES = 12


def render_report(report: AuditReport, sources: Mapping[str, str] | None = None) -> str:
    """Return the page. `sources` has texts of the files that the report names, by name: lines are shown among those around them."""
    texts = dict(sources or {})
    verdict = decide_verdict(report)
    head = make_element(
        "head",
        make_element("meta", charset="utf-8"),
        make_element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        make_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make_element("meta", name="color-scheme", content="light dark"),
        make_element("title", f"{verdict.headline} · {report.script}"),
        raw_style(STYLE),
    )
    body = make_element(
        "body",
        draw_header(report),
        make_element(
            "main",
            draw_finding(report.difference, texts) if report.difference else None,
            draw_failures(report.runs),
            draw_warnings(report.warnings),
            draw_loss_section(report),
            draw_divergence_section(report.divergence, report.difference),
            draw_section("What R changes", draw_comparison(report.comparison, texts)) if report.comparison else None,
            draw_section("Runs", draw_runs(report.runs)) if report.runs else None,
            draw_section("What was run", draw_facts(report)),
        ),
        class_=verdict.tone,
    )
    return f"<!doctype html>\n{make_element('html', head, body, lang='en')}\n"


def draw_header(report: AuditReport) -> Markup:
    """Return the first screen's verdict."""
    verdict = decide_verdict(report)
    steps = max((run.steps for run in report.runs), default=0)
    facts = [
        report.script,
        "no step was trained" if report.replicas is None else f"R = {report.replicas}",
        count_nouns(len(report.runs), "run"),
        count_nouns(steps, "step"),
    ]
    layer = [", in ", write_path(report.difference.layer)] if report.difference and report.difference.layer else None
    return make_element(
        "header",
        make_element("p", "unisono audit", class_="brand"),
        make_element("h1", make_element("span", {"same": "=", "parted": "≠", "open": "?"}[verdict.tone], class_="sign", aria_hidden="true"), " ",
                make_element("span", verdict.headline, layer)),
        make_element("p", verdict.sentence, class_="sentence"),
        make_element("ul", [make_element("li", fact) for fact in facts], class_="facts"),
    )  # fmt: skip


def draw_section(title: str, *content: Content) -> Markup:
    return make_element("section", make_element("h2", title), *content)


def draw_finding(difference: Difference, texts: Mapping[str, str]) -> Markup:
    """Return where two runs part, with the line of the user's, and what to write instead."""
    place = [
        ("Runs", [make_element("b", difference.runs[0]), " and ", make_element("b", difference.runs[1])]),
        ("Step", difference.step if difference.step else "before the first one"),
        ("Layer", write_path(difference.layer) if difference.layer else None),
        (
            "What differs",
            [KIND_WORDS[difference.kind], *([", first ", write_path(difference.variable)] if difference.variable else [])],
        ),
        ("Replica", difference.replica),
        ("Equation", make_element("code", difference.equation) if difference.equation else None),
        ("Cause", [str(difference.cause), "" if difference.is_certain else " (the most probable one)"]),
    ]
    return draw_section(
        "What happened" if difference.kind == EXIT else "Where they part",
        draw_source(difference.source, texts) if difference.source else None,
        make_element("div", make_element("h3", "What to write"), make_element("p", difference.what_to_write), class_="advice")
        if difference.what_to_write
        else None,
        draw_pairs(place),
        draw_variables(difference.differing),
    )


def draw_variables(paths: Sequence[str]) -> Markup | None:
    """Return the variables that differ; nothing where it is one, which the finding names."""
    if len(paths) < 2:
        return None
    more = len(paths) - MOST_VARIABLES
    return make_element(
        "details",
        make_element("summary", f"All {count_nouns(len(paths), 'variable')} that differ in this step"),
        make_element("ul", [make_element("li", write_path(path)) for path in paths[:MOST_VARIABLES]]),
        make_element("p", f"and {more:,} more", class_="note") if more > 0 else None,
    )


def draw_pairs(pairs: Sequence[tuple[str, Content]]) -> Markup:
    """Return names with their values; those without a value are left out."""
    return make_element(
        "dl",
        [make_element("div", make_element("dt", name), make_element("dd", value)) for name, value in pairs if value is not None],
    )


def draw_warnings(warnings: Sequence[str]) -> Markup | None:
    if not warnings:
        return None
    return draw_section(
        "Warnings", make_element("ul", [make_element("li", text, class_="quoted") for text in warnings], class_="warnings")
    )


def draw_failures(runs: Sequence[AuditedRun]) -> list[Markup]:
    """Return what failed runs wrote last."""
    return [
        draw_section(f"The last lines of {run.name}", make_element("pre", run.end_of_output, tabindex=0))
        for run in runs
        if run.end_of_output
    ]


def draw_loss_section(report: AuditReport) -> Markup | None:
    curves = [Curve(run.name, run.losses) for run in report.runs if run.losses]
    if not curves:
        return None
    first = report.difference.step if report.difference else None
    equal = (
        "Stripes of one ribbon are runs with the same losses, each drawn inside of the one before." if len(curves) > 1 else None
    )
    return draw_section("Losses", make_element("p", equal, class_="note") if equal else None, draw_losses(curves, first))


def draw_divergence_section(divergence: Sequence[Divergence], difference: Difference | None) -> Markup | None:
    """Return a plot for each pair of runs that differ, and the names of the pairs that do not. The pair of the finding comes first."""
    if not divergence:
        return None
    parted = [pair for pair in divergence if has_difference(pair)]
    parted.sort(key=lambda pair: difference is None or pair.runs != difference.runs)
    same = [" and ".join(pair.runs) for pair in divergence if not has_difference(pair)]
    layer = difference.layer if difference else None
    figures = [draw_divergence(pair, layer) for pair in parted]
    return draw_section(
        "Divergence by layer",
        [make_element("p", "How much of a layer's variables differs, step by step."), draw_levels()] if parted else None,
        figures[:1],
        make_element("details", make_element("summary", count_nouns(len(figures) - 1, "more pair"), " of runs"), figures[1:])
        if figures[1:]
        else None,
        make_element("p", "No layer differs at any step: ", "; ".join(same), ".") if same else None,
    )


def draw_runs(runs: Sequence[AuditedRun]) -> Markup:
    names = ("Run", "Devices", "Processes", "Steps", "Exit code", "Last loss", "Digest of the last step", "Time")
    head = make_element("tr", [make_element("th", name, scope="col") for name in names])
    return make_element(
        "table",
        make_element("thead", head),
        make_element("tbody", [draw_run(run, runs[0], names) for run in runs]),
        class_="runs",
    )


def draw_run(run: AuditedRun, first: AuditedRun, names: Sequence[str]) -> Markup:
    """Return the row of a run, whose digest is said to be that of the first run or another one."""
    loss = next((f"{loss:.9g}" for loss in reversed(run.losses) if loss is not None), NOTHING)
    is_other = run.digest != first.digest
    beside = None if run is first else make_element("span", "other" if is_other else "same", class_="odd" if is_other else "even")
    digest: Content = [make_element("code", run.digest), " ", beside] if run.digest else NOTHING
    exit_code: Content = NOTHING if run.exit_code is None else run.exit_code
    if run.exit_code:
        exit_code = make_element("span", run.exit_code, class_="odd")
    cells = [
        NOTHING if run.devices is None else run.devices,
        run.processes,
        run.steps,
        exit_code,
        loss,
        digest,
        write_seconds(run.seconds),
    ]
    return make_element(
        "tr",
        make_element("th", run.name, scope="row"),
        [make_element("td", cell, data_label=name) for name, cell in zip(names[1:], cells, strict=True)],
    )


def draw_facts(report: AuditReport) -> Markup:
    facts = [
        ("Command", make_element("code", shlex.join(report.command))),
        *((name, version) for name, version in report.versions.items()),
    ]
    return draw_pairs(facts)
