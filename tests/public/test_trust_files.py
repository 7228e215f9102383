"""The files by which others judge the project: they say what is true, and can be read by the programs for which they are."""

import datetime
import pathlib
import re
import tomllib

import pytest

import unisono as un

ROOT = pathlib.Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read_yaml(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


def test_the_citation_is_valid_and_of_this_version():
    citation = read_yaml(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == un.__version__
    assert citation["license"] == project["license"]
    assert all(set(author) <= {"name", "given-names", "family-names"} for author in citation["authors"])


def test_the_changelog_has_a_section_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.MULTILINE)
    assert heads[0] == ("Unreleased", "")
    assert un.__version__ in text
    for _, date in heads[1:]:
        datetime.date.fromisoformat(date)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }


def test_public_names_in_the_changelog_exist():
    text = (ROOT / "CHANGELOG.md").read_text()
    named = {name.removeprefix("unisono.") for name in re.findall(r"`((?:unisono\.|callbacks\.)?[A-Za-z_.]+)`", text)}
    exported = {name for name in named if name.split(".")[0] in {*dir(un), "callbacks"}}
    assert {"MirroredStrategy", "fingerprint", "callbacks.BackupAndRestore", "export"} <= exported
    for name in exported:
        found = un
        for part in name.split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_a_form_asks_for_what_helps(path):
    form = read_yaml(path)
    assert {"name", "description", "body"} <= set(form)
    assert {field["type"] for field in form["body"]} <= {"textarea", "input", "dropdown", "markdown", "checkboxes"}
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    assert all(field["attributes"]["label"] for field in form["body"])
    if path.stem != "wish":
        asked = path.read_text()
        for what in ("unisono.native", "unisono.__version__", "jaxlib", "print(strategy)", "placement"):
            assert what in asked


def test_the_commands_of_the_forms_run(capsys):
    commands = {command for path in FORMS for command in re.findall(r'`python -c "(.+?)"`', path.read_text())}
    assert len(commands) == 1
    exec(commands.pop(), {})
    assert str(un.native) in capsys.readouterr().out


def test_a_report_of_a_weakness_stays_private():
    text = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in text
    assert "@" not in text
