"""The tutorial as a notebook: equal to its page, and run by Jupyter's client as in Jupyter."""

import importlib.util
import json
import pathlib

import pytest

from processes import user_python as python

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tutorial_fit.ipynb"

RUN = """
import sys
import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""


def load_program():
    """Return docs/notebook.py as a module."""
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_is_the_page():
    """After a change of docs/tutorial_fit.md, write `python docs/notebook.py`."""
    program = load_program()
    assert program.NOTEBOOK == NOTEBOOK
    assert NOTEBOOK.read_text() == program.make_notebook(program.PAGE.read_text())
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    page = program.PAGE.read_text()
    assert sum(cell["cell_type"] == "code" for cell in cells) == page.count("```{code-cell}") > 5
    assert [cell["metadata"] for cell in cells if cell["metadata"]] == [{"tags": ["raises-exception"]}]
    assert all(cell["source"] for cell in cells)
    links = [line for cell in cells for line in cell["source"] if ".md)" in line]
    assert links
    assert all("](../docs/" in line for line in links)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.thorough
def test_the_notebook_runs_with_progress_bars_and_a_plot(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.ipynb"
    # Cells of a notebook run in the environment of the kernel, which is that of these tests.
    done = python("-c", RUN, str(NOTEBOOK), str(tmp_path), str(file), IPYTHONDIR=str(tmp_path), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [cell["outputs"] for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    printed = "".join("".join(output.get("text", "")) for cell in outputs for output in cell)
    assert "Epoch 3/3" in printed
    assert "━" in printed
    assert "24/24" in printed
    assert sum("image/png" in output.get("data", {}) for cell in outputs for output in cell) == 1
    (error,) = (output for cell in outputs for output in cell if output["output_type"] == "error")
    assert error["ename"] == "ValueError"
    assert not [output for cell in outputs for output in cell if output.get("name") == "stderr"]
