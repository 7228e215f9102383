"""A report is printed as a table or as JSON, and written into the file that is asked for."""

from __future__ import annotations

import json
import pathlib

import pytest

from unisono._src.tools.cli.output import output_report

CONTENT = {"equal": False, "runs": [{"name": "ä, <b>"}]}


@pytest.mark.parametrize("is_written", [True, False])
def test_the_table_is_printed(tmp_path, capsys, is_written):
    path = tmp_path / "report.json"
    output_report("a table", CONTENT, path if is_written else None)
    assert capsys.readouterr().out == "a table\n"
    assert path.exists() == is_written
    assert not is_written or json.loads(path.read_text(encoding="utf-8")) == CONTENT


def test_a_dash_prints_json_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output_report("a table", CONTENT, pathlib.Path("-"))
    assert json.loads(capsys.readouterr().out) == CONTENT
    assert list(tmp_path.iterdir()) == []
