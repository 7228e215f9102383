"""The HTML report: one file that is well formed, refers to nothing outside, escapes what it quotes, and says what was found."""

from __future__ import annotations

import dataclasses
import html.parser
import math
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from audit_samples import LAYERS, equal_report, parted_report, replace_texts, sample_run
from unisono._src.tools.audit.audit_report import AuditReport, Divergence
from unisono._src.tools.audit.html_report import POLICY, draw_strip, label_steps, make_axis, render_report, show_unseen

HOSTILE = [
    "<script>ran = 1</script>",
    "\"'><img src=x onerror=ran=1>",
    "</style></title></pre><svg onload=ran=1>",
    "&lt;b&gt; &amp; &#60;",
    "{{ 1 }}{% raw %}{#",
    "層/Größe/слой/🎻",
    "a" * 3000,
    "/".join(["encoder"] * 200),
    "]]><!-- <!doctype",
]
VOID = {"meta", "wbr"}
"""Elements that have no end."""


class Page(html.parser.HTMLParser):
    """A page, read strictly: each element that begins must end, in order, and nothing in it runs or is loaded."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []
        assert not re.search("<script|<link|<img|@import|url\\(", page)
        assert not re.search(r'="[^"<>]*://', page)
        assert page.encode()

    def handle_starttag(self, tag, attrs):
        names = {name for name, _ in attrs}
        assert len(names) == len(attrs), (tag, attrs)
        assert not [name for name in names if name.startswith("on") or name in {"src", "href", "action", "data", "srcset"}]
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.remove(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def with_class(self, name):
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]


def read(report: AuditReport, **changes: Any) -> Page:
    return Page(render_report(dataclasses.replace(report, **changes)))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_everything_quoted_is_escaped(text):
    """In every text of a report at once: the page has the elements of the page of harmless names, and shows the text as it is."""
    hostile, harmless = (
        Page(render_report(replace_texts(parted_report(), lambda _, name=name: name)))
        for name in (text, "/".join(["x"] * (text.count("/") + 1)))
    )
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert hostile.text.count(text[:300]) > 30


def test_characters_that_are_not_seen_are_written_out():
    assert show_unseen("a\u202eb\x00c\ud800d\te\n") == "a\\u202eb\\x00c\\ud800d\te\n"
    assert "\\u202e" in render_report(replace_texts(parted_report(), lambda _: "a\u202eb\ud800"))
    Page(render_report(replace_texts(parted_report(), lambda _: "")))


def test_the_first_screen_says_that_runs_are_equal():
    page = read(equal_report())
    assert "Same bits on all placements" in page.text
    assert "3 runs of 4 steps: rows, gradients, weights and optimizer state are the same, bit by bit." in page.text
    assert "No layer differs at any step: 1 devices and 2 devices; 1 devices and 3 devices." in page.text
    assert page.with_class("same")
    assert not page.with_class("first")
    assert POLICY.startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_the_page_says_where_runs_part_and_why():
    report = parted_report()
    page = read(report)
    found = report.difference
    assert found is not None
    start = page.text.index("The runs part at step 2, in block/attention/query")
    assert start < page.text.index(found.cause_words) < page.text.index("Where they part")
    text = " ".join(page.text.split())
    for said in (found.what_to_write, found.variable, found.equation, "In 1 device0.25", "In 8 devices0.5", "The clock is read."):
        assert said in text
    (line,) = [attributes for tag, attributes in page.elements if tag == "line" and attributes["class"] == "first"]
    assert line["x1"] == line["x2"] == "37.50%"
    assert len([tag for tag, attributes in page.elements if attributes.get("role") == "img"]) == 1 + len(LAYERS)


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"step": 0, "kind": "entry"}, "The runs part before the first step"),
        ({"kind": "steps"}, "The runs have different numbers of steps"),
        ({"kind": "exit", "step": 0}, "A run failed"),
        (
            dict.fromkeys(("layer", "source", "variable", "array", "row", "replica", "equation", "values")),
            "The runs part at step 2",
        ),
    ],
)
def test_kinds_of_differences_have_words(changes, headline):
    found = parted_report().difference
    assert found is not None
    page = render_report(dataclasses.replace(parted_report(), difference=dataclasses.replace(found, **changes)))
    assert headline in Page(page).text
    assert ("<dt>Layer</dt>" in page) == ("layer" not in changes)


def test_the_output_of_a_failed_run_is_shown():
    failed = sample_run("8 devices", (), steps=0, exit_code=1, devices=None, digest=None, end_of_output="ValueError: <no>")
    page = read(parted_report(), runs=(parted_report().runs[0], failed))
    assert "The last lines of 8 devices" in page.text
    assert "ValueError: <no>" in page.text


LINES = "def call(x):\n    if training:\n        noise = numpy.random.normal()\n        return x + noise\n    return x\n"


@pytest.mark.parametrize(("text", "shown"), [(LINES, 5), ("# new\n" + LINES, 1), ("", 1)], ids=["as it was", "moved", "emptied"])
def test_a_line_is_shown_among_those_around_it_unless_the_file_has_changed(tmp_path, text, shown):
    file = tmp_path / "train.py"
    file.write_text(text)
    page = read(parted_report(str(file)))
    assert len(page.with_class("line")) == shown
    assert len(page.with_class("meant")) == 1
    assert "noise = numpy.random.normal()" in page.text


@pytest.mark.parametrize("name", ["gone.py", "<stdin>", "a\0b", "."])
def test_of_a_file_that_cannot_be_read_the_line_alone_is_shown(name):
    assert len(read(parted_report(name)).with_class("line")) == 1


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((2.0, 1.0), "at every step the loss of first"),
        ((2.0, math.nextafter(1.0, 2.0)), "another loss than first from step 2 on"),
        ((2.0,), "the losses of first, with 1 step in place of 2"),
        ((2.0, math.nan), "another loss than first from step 2 on; NaN or infinite at 1 step, the first one is step 2"),
        ((2.0, None), "another loss than first from step 2 on; no loss is told at 1 of 2 steps"),
    ],
)
def test_the_legend_says_what_eyes_cannot_see(losses, words):
    runs = sample_run("first", (2.0, 1.0)), sample_run("other", losses)
    assert f"other {words}\n" in read(equal_report(), runs=runs).text


UNUSUAL = [
    (), (1.0,), (None, None), (math.nan, math.inf), (-math.inf, 1.0, None, 2.0, None), (0.0, 0.0), (1e308, -1e308, 1.0), (1e-320, 5.0),
    (1e38, 1e-38), (5e-324, 5e-324),
]  # fmt: skip


@pytest.mark.parametrize("losses", UNUSUAL)
def test_any_losses_are_drawn(losses):
    runs = (sample_run("a", losses), sample_run("b", tuple(-loss if loss else loss for loss in losses)))
    page = read(equal_report(), runs=runs, divergence=())
    paths = [curve["d"] for curve in page.with_class("curve")]
    assert all(0 <= float(number) <= 1000 for path in paths for number in re.findall(r"[-\d.e+]+", path))
    assert not re.search("nan|inf", "".join(paths))


@given(st.lists(st.floats(-1e290, 1e290), min_size=1))
@example([9.99999999999999e289, 9.999999999999994e289])
@example([1.0, 1.0000000000000002])
@example([1e-4, 20.0])
def test_numbers_lie_on_the_axis_and_its_ticks_can_be_told_apart(numbers):
    axis = make_axis(numbers)
    assert all(0 <= axis.locate(number) <= 1 for number in numbers)
    assert len(axis.ticks) <= 8
    assert len({text for _, text in axis.labels}) == len(axis.ticks)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in axis.labels)


@given(st.integers(1, 3000))
def test_some_steps_are_named_below_a_plot(count):
    places = label_steps(range(7, 7 + count))
    assert places[0][1] == 7
    assert len(places) <= 8


def test_cells_are_dark_where_variables_differ():
    assert draw_strip((0.0, 0.5, 1.0, 0.2)) == [(0.25, 0.25, 0.625), (0.5, 0.25, 1.0), (0.75, 0.25, 0.4)]
    assert len(read(parted_report()).with_class("strip")) == len(LAYERS)


@pytest.mark.parametrize(("layers", "steps"), [(300, 20), (3, 5000), (0, 0), (1, 0)])
def test_a_large_model_and_a_long_run_stay_small(layers, steps):
    """Every cell has another shade than its neighbours, in five pairs of runs: the worst that there is."""
    fractions = tuple(tuple(0.25 * ((step * 7 + layer) % 5) for step in range(steps)) for layer in range(layers))
    names = tuple(f"block_{layer}/attention/kernel" for layer in range(layers))
    pairs = tuple(Divergence(("a", str(run)), names, tuple(range(1, steps + 1)), fractions) for run in range(5))
    runs = tuple(sample_run(str(run), tuple(math.sin(step * run) for step in range(steps))) for run in range(6))
    page = render_report(dataclasses.replace(parted_report(), runs=runs, divergence=pairs))
    assert len(page.encode()) < 1_000_000
    assert len(Page(page).with_class("strip")) == (5 * min(layers, 60) if steps else 0)
