"""The HTML report: one file that is well formed, refers to nothing outside, escapes what it quotes, and says what was found."""

from __future__ import annotations

import dataclasses
import html.parser
import itertools
import math
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from audit_samples import LAYERS, equal_report, parted_report, replace_texts, sample_run
from sizes import cases
from unisono._src.audit.audit_report import AuditReport, Difference, Divergence, ReplicaRows
from unisono._src.audit.html_curves import Curve, compare_curves
from unisono._src.audit.html_elements import VOID, make_element, raw_style, show_unseen
from unisono._src.audit.html_losses import choose_strokes, thin_out
from unisono._src.audit.html_numbers import choose_steps, make_axis
from unisono._src.audit.html_report import POLICY, render_report
from unisono._src.audit.html_source import read_sources
from unisono._src.audit.html_style import COLOURS, STYLE

HOSTILE = [
    "<script>ran = 1</script>",
    "\"'><img src=x onerror=ran=1>",
    "</style></title></pre><svg onload=ran=1>",
    "&lt;b&gt; &amp; &#60;",
    "層/Größe/слой/🎻",
    "a" * 3000,
    "/".join(["encoder"] * 200),
    "]]><!-- <!doctype",
]


class Page(html.parser.HTMLParser):
    """A page, read strictly: each element that begins must end, in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def with_class(self, name):
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]


def assert_sound(page: str) -> Page:
    """Read a page, and look that nothing in it runs or is loaded."""
    read = Page(page)
    assert {tag for tag, _ in read.elements} <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "header",
            "main",
            "section",
            "h1",
            "h2",
            "h3",
            "p",
            "span",
            "b",
            "code",
            "pre",
        ),
        *("ul", "li", "dl", "div", "dt", "dd", "details", "summary", "figure", "figcaption", "wbr"),
        *(
            "table",
            "thead",
            "tbody",
            "tfoot",
            "tr",
            "th",
            "td",
            "svg",
            "desc",
            "g",
            "line",
            "path",
            "rect",
            "text",
            "defs",
            "pattern",
        ),
    }
    names = {name for _, attributes in read.elements for name in attributes}
    assert not [
        name for name in names if name.startswith("on") or name in {"src", "href", "xlink:href", "action", "data", "srcset"}
    ]
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert page.encode()
    return read


@pytest.mark.parametrize("report", [equal_report(), parted_report()], ids=["equal", "parted"])
def test_a_page_refers_to_nothing_outside(report):
    page = render_report(report)
    assert_sound(page)
    assert not re.search(r"https?:|//|@import|<script|<link", page)
    assert POLICY.startswith("default-src 'none'; style-src 'unsafe-inline'")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_everything_quoted_is_escaped(text):
    """In every text of a report at once: the page has the elements of the page of harmless names, and shows the text as it is."""
    make = lambda name: render_report(replace_texts(parted_report(), lambda _: name), {name: "\n\n" + name})
    read, harmless = assert_sound(make(text)), assert_sound(make("/".join(["x"] * (text.count("/") + 1))))
    assert [tag for tag, _ in read.elements] == [tag for tag, _ in harmless.elements]
    assert read.text.count(text[:300]) > 30


def test_empty_texts_do_no_harm():
    assert_sound(render_report(replace_texts(parted_report(), lambda _: "")))


@settings(max_examples=cases(30, 100))
@given(st.text())
def test_text_of_any_characters_is_escaped(text):
    read = Page(make_element("p", text, title=text))
    assert [tag for tag, _ in read.elements] == ["p"]
    assert read.elements[0][1]["title"] == read.text == show_unseen(text)


def test_characters_that_are_not_seen_are_written_out():
    assert show_unseen("a\u202eb\x00c\ud800d\te\n") == "a\\u202eb\\x00c\\ud800d\te\n"
    assert "\\u202e" in render_report(replace_texts(parted_report(), lambda _: "a\u202eb\ud800"))


def test_style_sheets_cannot_end_their_element():
    assert "<" not in STYLE
    with pytest.raises(ValueError, match='received "<".*takes none'):
        raw_style("</style>")


def test_the_first_screen_says_that_runs_are_equal():
    read = assert_sound(render_report(equal_report()))
    assert "Same bits on all placements" in read.text
    assert "3 runs of 4 steps: rows, gradients, weights and optimizer state are the same, bit by bit." in read.text
    assert read.with_class("same")
    assert not read.with_class("first")


def test_the_first_screen_says_where_runs_part_and_why():
    read = assert_sound(render_report(parted_report()))
    start = read.text.index("The runs part at step 2, in block/attention/query")
    assert start < read.text.index("Probable cause: The step draws numbers with numpy.") < read.text.index("Where they part")
    certain = dataclasses.replace(parted_report().difference, is_certain=True)
    assert "Cause: The step" in Page(render_report(dataclasses.replace(parted_report(), difference=certain))).text


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"runs": ()}, "Nothing was compared"),
        ({"runs": equal_report().runs[:1]}, "Nothing was compared"),
        ({"equal": False}, "The runs are not equal"),
        ({"runs": tuple(sample_run(name, (), steps=0) for name in "ab")}, "No step was compared"),
    ],
)
def test_what_was_not_compared_is_not_called_equal(changes, headline):
    read = assert_sound(render_report(dataclasses.replace(equal_report(), **changes)))
    assert headline in read.text
    assert "Same bits" not in read.text


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"step": 0, "kind": "entry"}, "The runs part before the first step"),
        ({"kind": "steps"}, "The runs have different numbers of steps"),
        ({"kind": "exit", "step": 0}, "A run failed"),
        ({"layer": None, "source": None, "variable": None, "equation": None, "replica": None}, "The runs part at step 2"),
    ],
)
def test_kinds_of_differences_have_words(changes, headline):
    difference: Difference = dataclasses.replace(parted_report().difference, **changes)
    assert headline in assert_sound(render_report(dataclasses.replace(parted_report(), difference=difference))).text


def test_the_output_of_a_failed_run_is_shown():
    failed = sample_run("8 devices", (), steps=0, exit_code=1, devices=None, end_of_output="ValueError: <no>")
    report = dataclasses.replace(parted_report(), runs=(parted_report().runs[0], failed))
    read = assert_sound(render_report(report))
    assert "The last lines of 8 devices" in read.text
    assert "ValueError: <no>" in read.text


class TestSource:
    LINES = "def call(x):\n    if training:\n        noise = numpy.random.normal()\n        return x + noise\n    return x\n"

    def test_the_line_is_shown_among_those_around_it(self, tmp_path):
        file = tmp_path / "train.py"
        file.write_text(self.LINES)
        report = parted_report(str(file))
        read = assert_sound(render_report(report, read_sources(report)))
        assert "5    return x\n" in read.text
        assert len(read.with_class("line")) == 5
        assert len(read.with_class("meant")) == 1

    @pytest.mark.parametrize("change", [lambda lines: "# new\n" + lines, lambda lines: ""], ids=["moved", "emptied"])
    def test_a_file_that_has_changed_since_is_not_shown(self, tmp_path, change):
        file = tmp_path / "train.py"
        file.write_text(change(self.LINES))
        report = parted_report(str(file))
        read = assert_sound(render_report(report, read_sources(report)))
        assert "3noise = numpy.random.normal()\n" in read.text
        assert len(read.with_class("line")) == 1

    @pytest.mark.parametrize("name", ["gone.py", "<stdin>", "a\0b", "."])
    def test_a_file_that_cannot_be_read_is_left_out(self, name):
        assert read_sources(parted_report(name)) == {}


class TestLosses:
    def test_curves_that_coincide_are_stripes_inside_of_each_other(self):
        strokes = choose_strokes([Curve(str(run), (1.0, math.nan, None)) for run in range(5)])
        assert all(one.width >= other.width + 4 and one.percent < other.percent for one, other in itertools.pairwise(strokes))
        assert not any(stroke.is_parted for stroke in strokes)

    def test_curves_that_part_lie_on_top_in_another_colour_and_with_dashes(self):
        runs = (*parted_report().runs, sample_run("1 device, again", parted_report().runs[0].losses))
        read = Page(render_report(dataclasses.replace(parted_report(), runs=runs)))
        drawn = [attributes for attributes in read.with_class("curve") if attributes["d"] != "M3 8H37"]
        assert [attributes["class"] for attributes in drawn] == ["curve", "curve", "curve parted"]
        strokes = choose_strokes([Curve("a", (1.0,)), *(Curve(str(run), (2.0,)) for run in range(4))])
        assert len({(stroke.width, stroke.dashes) for stroke in strokes[1:]}) == 4

    @pytest.mark.parametrize(
        ("losses", "words"),
        [
            ((2.0, 1.0), "at every step the loss of first"),
            ((2.0, 1.25), "another loss than first from step 2 on, at most 0.25 apart"),
            ((2.0, math.nextafter(1.0, 2.0)), "another loss than first from step 2 on, at most 2.2e-16 apart"),
            ((2.0,), "the losses of first, with 1 step in place of 2"),
            ((2.0, math.nan), "another loss than first from step 2 on; NaN or infinite at 1 step, the first one is step 2"),
            ((2.0, None), "another loss than first from step 2 on; no loss is told at 1 of 2 steps"),
        ],
    )
    def test_the_legend_says_what_eyes_cannot_see(self, losses, words):
        assert compare_curves(Curve("first", (2.0, 1.0)), Curve("other", losses)) == words

    @pytest.mark.parametrize(
        "losses",
        [
            (),
            (1.0,),
            (None, None),
            (math.nan, math.inf),
            (-math.inf, 1.0, None, 2.0, None),
            (0.0, 0.0),
            (1e308, -1e308, 1.0),
            (1e-320, 5.0),
            (1e38, 1e-38),
            (1.0, math.nextafter(1.0, 2.0)),
            (5e-324, 5e-324),
        ],
    )
    def test_any_losses_are_drawn(self, losses):
        other = tuple(-loss if loss else loss for loss in losses)
        runs = (sample_run("a", losses), sample_run("b", other))
        page = render_report(dataclasses.replace(equal_report(), runs=runs, divergence=()))
        read = assert_sound(page)
        numbers = [float(number) for curve in read.with_class("curve") for number in re.findall(r"[-\d.e+]+", curve["d"])]
        assert all(0 <= number <= 1000 for number in numbers)
        assert "nan" not in page.replace("Last loss", "").split("Runs</h2>")[0]

    def test_the_step_where_runs_part_is_marked(self):
        read = Page(render_report(parted_report()))
        (line,) = [attributes for tag, attributes in read.elements if tag == "line" and attributes["class"] == "first"]
        assert line["x1"] == line["x2"] == "37.50%"
        assert "step 2" in read.text

    @given(st.integers(600, 700), st.dictionaries(st.integers(0, 600), st.none() | st.floats()))
    def test_a_thinned_curve_keeps_extremes_and_gaps(self, steps, unusual):
        losses = [unusual.get(step, math.sin(step)) for step in range(steps)]
        kept = thin_out(losses)
        assert len(kept) <= 600
        assert [step for step, _ in kept] == sorted({step for step, _ in kept})
        finite = [loss for loss in losses if loss is not None and math.isfinite(loss) and abs(loss) < 1e300]
        drawn = [loss for _, loss in kept if loss in finite]
        assert not finite or (min(drawn) == min(finite) and max(drawn) == max(finite))
        assert len(finite) == len(losses) or len(drawn) < len(kept)


class TestAxis:
    @given(st.lists(st.floats(-1e290, 1e290), min_size=1))
    @example([9.99999999999999e289, 9.999999999999994e289])
    @example([1.0, 1.0000000000000002])
    def test_numbers_lie_on_it(self, numbers):
        axis = make_axis(numbers)
        assert all(0 <= axis.place(number) <= 1 for number in numbers)
        assert len(axis.ticks) <= 8
        assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in axis.ticks)
        assert len(axis.write_ticks()) == len(axis.ticks)

    def test_ticks_are_round_numbers(self):
        assert make_axis([0.31, 2.4]).write_ticks() == ["0.5", "1.0", "1.5", "2.0", "2.5"]
        assert make_axis([1e-4, 20.0]).write_ticks() == ["1e-4", "1e-3", "1e-2", "1e-1", "1e0", "1e1"]

    @given(st.integers(0, 5000), st.integers(1, 3000))
    def test_the_first_and_the_last_step_are_named(self, first, count):
        named = choose_steps(range(first, first + count))
        assert named[0] == 0
        assert named[-1] == count - 1
        assert named == sorted(set(named))
        assert len(named) <= 8


class TestDivergence:
    def test_cells_are_dark_where_variables_differ(self):
        read = Page(render_report(parted_report()))
        cells = [
            (attributes["class"], attributes["d"])
            for tag, attributes in read.elements
            if tag == "path" and "level" in attributes["class"]
        ]
        assert cells == [
            ("level2", "M3 0H4V1H3z"),
            ("level2", "M1 0H2V1H1z"),
            ("level4", "M2 0H4V1H2z"),
            ("level1", "M2 0H3V1H2z"),
            ("level4", "M3 0H4V1H3z"),
        ]

    def test_the_first_step_and_its_layer_are_marked(self):
        read = Page(render_report(parted_report()))
        marks = [attributes["d"] for tag, attributes in read.elements if tag == "path" and attributes["class"] == "first"]
        assert marks == ["M1 0V1"] * len(LAYERS)
        assert len(read.with_class("named")) == 1
        assert f"▸ {LAYERS[1]}" in read.text

    def test_pairs_that_do_not_differ_are_named_in_words(self):
        read = Page(render_report(equal_report()))
        assert "No layer differs at any step: 1 devices and 2 devices; 1 devices and 3 devices." in read.text
        assert not read.with_class("heat")

    @pytest.mark.parametrize(("layers", "steps"), [(40, 200), (300, 20), (3, 5000)])
    def test_a_large_model_and_a_long_run_stay_small(self, layers, steps):
        """Every fifth cell has another shade than its neighbours, in five pairs of runs: the worst that there is."""
        fractions = tuple(tuple(0.25 * ((step * 7 + layer) % 5) for step in range(steps)) for layer in range(layers))
        names = tuple(f"block_{layer}/attention/kernel" for layer in range(layers))
        pairs = tuple(Divergence(("a", str(run)), names, tuple(range(1, steps + 1)), fractions) for run in range(5))
        runs = tuple(sample_run(str(run), tuple(math.sin(step * run) for step in range(steps))) for run in range(6))
        began = time.process_time()
        page = render_report(dataclasses.replace(parted_report(), runs=runs, divergence=pairs))
        assert time.process_time() - began < 5
        assert len(page.encode()) < 1_000_000
        read = assert_sound(page)
        assert len(read.with_class("strip")) == 5 * min(layers, 60)
        assert ("240 more layers are not shown." in read.text) is (layers == 300)
        assert ("Each cell is the largest of 21 steps." in read.text) is (steps == 5000)

    @pytest.mark.parametrize(("layers", "steps"), [((), ()), (("a",), ()), ((), (1,))])
    def test_nothing_is_drawn_of_nothing(self, layers, steps):
        empty = Divergence(("a", "b"), layers, steps, ((0.0,) * len(steps),) * len(layers))
        assert_sound(render_report(dataclasses.replace(parted_report(), divergence=(empty,))))


class TestReplicas:
    def test_bars_are_as_long_as_the_rows(self):
        read = Page(render_report(parted_report()))
        bars = [
            (attributes["class"], attributes["x"], attributes["width"])
            for tag, attributes in read.elements
            if tag == "rect" and "%" in (attributes["width"] or "")
        ]
        assert bars == [
            ("seen", "0.000%", "100.000%"),
            ("seen", "0.000%", "60.000%"),
            ("twice", "60.000%", "20.000%"),
            ("missing", "80.000%", "20.000%"),
        ]

    def test_of_many_replicas_those_with_other_rows_are_shown(self):
        comparison = parted_report().comparison
        rows = tuple(ReplicaRows(replica, 8, int(replica == 999), 0) for replica in range(1000))
        read = Page(render_report(dataclasses.replace(parted_report(), comparison=dataclasses.replace(comparison, rows=rows))))
        assert len(read.with_class("bar")) == 64
        assert "Replica 999: 8 rows, 1 duplicates, 0 missing" in read.text
        assert "936 more replicas without duplicates and missing rows." in read.text

    def test_replicas_without_rows_are_drawn(self):
        comparison = dataclasses.replace(parted_report().comparison, rows=(ReplicaRows(0, 0, 0, 0),))
        assert_sound(render_report(dataclasses.replace(parted_report(), comparison=comparison)))


def test_pictures_have_names():
    """Each picture that is not left to the text beside it has a title, which is read aloud."""
    page = render_report(parted_report())
    pictures = re.findall(r'<svg[^>]*role="img"[^>]*>(<title>)?', page)
    assert len(pictures) == 1 + len(LAYERS) + 2
    assert all(pictures)
    roots = [attributes for tag, attributes in Page(page).elements if tag == "svg" and "overflow" not in attributes]
    assert all(attributes.get("role") == "img" or attributes.get("aria-hidden") == "true" for attributes in roots)


def test_text_can_be_told_from_its_ground():
    """In each tone, light and dark, by the contrast of WCAG's level AA."""
    light, dark = COLOURS.split("@media")
    for scheme in (light, dark):
        ground = read_colours(scheme, ":root")
        for tone in ("same", "parted"):
            colours = ground | read_colours(scheme, f".{tone}")
            for paper in ("paper", "card", "wash"):
                for ink in ("ink", "quiet", "accent"):
                    assert contrast(colours[ink], colours[paper]) >= 4.5, (scheme, tone, ink, paper)


def read_colours(style: str, selector: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#\w{6})", style[style.index(selector) :].split("}")[0]))


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_report_is_drawn_the_same_each_time():
    report: AuditReport = parted_report()
    assert render_report(report) == render_report(report)
