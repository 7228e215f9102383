"""Writes examples/tutorial_fit.ipynb, the notebook of the tutorial on `fit`: python docs/notebook.py.

The page docs/tutorial_fit.md is the source. A test compares the notebook with it.
"""

from __future__ import annotations

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial_fit.md"
NOTEBOOK = ROOT / "examples" / "tutorial_fit.ipynb"

CODE_CELL = re.compile(r"^```\{code-cell\} python\n((?::[^\n]*\n)*)(.*?)^```\n", re.DOTALL | re.MULTILINE)


def make_notebook(page: str) -> str:
    """Return the notebook of a MyST page as JSON, without outputs."""
    text = re.sub(r"\A---\n.*?^---\n", "", page, flags=re.DOTALL | re.MULTILINE)
    cells = []
    end = 0
    for cell in CODE_CELL.finditer(text):
        cells += make_text_cell(text[end : cell.start()])
        cells.append(make_code_cell(options=cell[1], code=cell[2]))
        end = cell.end()
    cells += make_text_cell(text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def make_text_cell(text: str) -> list[dict[str, object]]:
    """Return the cell of a text between code, or nothing if there is none. Links to pages lead from the notebook to the page."""
    text = re.sub(r"\]\((?=\w+\.md)", "](../docs/", text.strip())
    return [{"cell_type": "markdown", "metadata": {}, "source": split_lines(text)}] if text else []


def make_code_cell(options: str, code: str) -> dict[str, object]:
    """Return the cell of code. Where the site has a line for each epoch, Jupyter shows Keras' progress bar."""
    tags = re.findall(r"[\w-]+", "".join(re.findall(r"^:tags: (.*)", options, re.MULTILINE)))
    source = split_lines(code.rstrip("\n").replace("verbose=2", "verbose=1"))
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {"tags": tags} if tags else {},
        "outputs": [],
        "source": source,
    }


def split_lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    NOTEBOOK.write_text(make_notebook(PAGE.read_text()))
    print(NOTEBOOK)
