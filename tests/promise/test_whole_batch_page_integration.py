"""The page of losses that look at the whole batch: its cells compare each step with plain Keras, and the bits of one device with those of eight."""

import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "whole_batch.md"
SHOWN = """
import sys, types
sys.modules["IPython.display"] = sys.modules["IPython"] = types.SimpleNamespace(Markdown=print)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_every_cell_of_the_page_finds_the_numbers_of_keras():
    """A cell fails where a distance is above 2e-6 of the change, or where devices differ in a bit."""
    cells = re.findall(r"^```\{code-cell\} python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(cells) > 5
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([SHOWN, *cells])], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^\| .* \| \de-\d\d \|$", done.stdout, re.MULTILINE)) == 7
