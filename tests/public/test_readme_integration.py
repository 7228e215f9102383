"""What the README shows must run, and its figures must be those that were measured."""

import importlib
import pathlib
import re
import textwrap

import pytest

import unisono as un
from processes import user_python as python

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
LOOP = (pathlib.Path(__file__).parents[2] / "docs" / "loop.md").read_text()
DOCS = sorted((pathlib.Path(__file__).parents[2] / "docs").glob("*.md"))
MAKEFILE = (pathlib.Path(__file__).parents[2] / "Makefile").read_text()
MEASURED = pathlib.Path(__file__).parents[2] / "benchmarks" / "measured"
DEVICES_OF_README = "MLP 64-32-10, batch 64", "W3 MLP, batch 32"
NAMES = {"torch": "torch by hand", "torch on two processes": "torch DDP"}
"""Of contenders, where the README has others than the results."""


def printed_by_first_program_of(text, tmp_path):
    """What a reader sees who copies the first program of a page."""
    pytest.importorskip("sklearn")
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert program is not None
    file = tmp_path / "program.py"
    file.write_text(program[1])
    finished = python(str(file))
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.processes
@pytest.mark.slow
def test_first_program_prints_one_fingerprint_for_two_placements(tmp_path):
    fingerprints = re.findall(r"^[0-9a-f]{32}$", printed_by_first_program_of(README, tmp_path), re.MULTILINE)
    assert len(fingerprints) == 2
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_the_loop_in_the_docs_learns(tmp_path):
    printed = printed_by_first_program_of(LOOP, tmp_path)
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+), accuracy [\d.]+%$", printed, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]


def program_of_cells(page):
    """The cells of a page that is a notebook, as one program. Where a cell is to raise, the program ends if it does not."""
    program = []
    for tags, cell in re.findall(
        r"^```\{code-cell\} python\n(:tags: [^\n]*\n)?(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        if "raises-exception" in tags:
            cell = (
                f"try:\n{textwrap.indent(cell, '    ')}\nexcept Exception:\n    pass\nelse:\n    raise SystemExit('no error')\n"
            )
        program.append(cell)
    return "\n".join(program)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough  # make docs runs them as well
@pytest.mark.parametrize("page", [page for page in DOCS if "file_format: mystnb" in page.read_text()], ids=lambda page: page.stem)
def test_the_cells_of_a_page_run(page, tmp_path):
    pytest.importorskip("sklearn")
    file = tmp_path / "program.py"
    file.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n{program_of_cells(page)}")
    finished = python(str(file))
    assert finished.returncode == 0, finished.stderr


def test_every_make_target_that_the_readme_names_exists():
    named = set(re.findall(r"make (\w+)", README))
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^(\w+):", MAKEFILE, re.MULTILINE))


def test_every_module_that_the_docs_name_exists():
    docs = pathlib.Path(__file__).parents[2] / "docs"
    named = {
        name.rstrip("/") for page in docs.glob("*.md") for name in re.findall(r"[\[ ]`([a-z_]+/[a-z_/]*)`[\],]", page.read_text())
    }
    assert "engine/step/program" in named
    root = pathlib.Path(un.__file__).parent / "_src"
    assert [name for name in named if not (root / name).is_dir() and not (root / f"{name}.py").is_file()] == []


def test_the_table_of_speed_is_what_was_measured(monkeypatch):
    rows = re.findall(r"^\| [^|]+ batch \d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+), (.+?) \|$", README, re.MULTILINE)
    written = [(*map(float, figures), NAMES.get(name, name)) for *figures, name in rows]
    expected, times_as_fast = [], {}
    monkeypatch.syspath_prepend(MEASURED.parent)
    results = importlib.import_module("results")
    newest = results.list_machines(MEASURED)[0]
    for workload, found in results.read_result(newest, "peers").items():
        ms = {name: 1e3 * one["seconds"] for name, one in found.items() if one["seconds"]}
        theirs = min((name for name in ms if found[name]["is_peer"]), key=lambda name: ms[name])
        shown = (rounded(ms[name]) for name in ("Unisono, default", "Unisono without kernels", "Keras on JAX", theirs))
        expected.append((*shown, theirs))
        times_as_fast[workload] = ms[theirs] / ms["Unisono, default"]
    assert written == expected
    check_times_as_fast(times_as_fast)


def test_the_table_of_devices_is_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(MEASURED.parent)
    results = importlib.import_module("results")
    newest = results.list_machines(MEASURED)[0]
    found = {(row["workload"], row["on"]): row for row in results.read_result(newest, "devices")}
    table = README[README.index("| milliseconds a step | Unisono, 1 device |") :].split("\n\n")[0].splitlines()[2:]
    written = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table]
    for (name, *cells), workload in zip(written, DEVICES_OF_README, strict=True):
        ours = [found[workload, on]["Unisono, ms"] for on in ("1 device", "2 devices", "8 devices")]
        theirs = [found[workload, on]["Keras DataParallel on JAX, ms"] for on in ("2 devices", "8 devices")]
        shown = [f"{rounded(ms):g}" if isinstance(ms, float) else "ended by SIGABRT" for ms in (*ours, *theirs)]
        assert cells == shown, name


def check_times_as_fast(times):
    """Of eight as measured; of the two that vary, the range has what was measured last."""
    sentences = re.search(
        r"Eight of the ten train ([\d.]+) to ([\d.]+) times as fast .+: ([\d.]+) to ([\d.]+) times and ([\d.]+) to ([\d.]+) times",
        README,
        re.DOTALL,
    )
    assert sentences is not None
    least, most, *ranges = map(float, sentences.groups())
    for workload, (low, high) in {"W3 MLP, batch 6000": ranges[:2], "W4 transformer": ranges[2:]}.items():
        assert low <= round(times.pop(workload), 2) <= high
    assert len(times) == 8
    assert (round(min(times.values()), 2), round(max(times.values()), 2)) == (least, most)


def test_what_was_tried_on_gpus_stands_before_everything_else():
    first_screen = README[: README.index("## Install")]
    assert "GPUs were tried one at a time" in first_screen
    assert "not tried" in first_screen


def test_the_address_to_clone_from_says_that_it_is_a_placeholder():
    (address,) = re.findall(r"git clone (\S+)", README)
    assert address.startswith("https://example.org/PLACEHOLDER/")
    assert "is a placeholder" in README[: README.index(address)]


def rounded(ms):
    """Three digits, or whole milliseconds."""
    return float(f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}")
