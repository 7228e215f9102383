"""What the command says of itself: help, version and completion."""

import shutil
import subprocess

import pytest

import unisono as un
from processes import python
from unisono._src.tools import cli


def printed_by(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert not stopped.value.code
    return capsys.readouterr().out


def test_the_version_is_printed(capsys):
    assert printed_by(capsys, "--version") == f"unisono {un.__version__}\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--help"], ["{launch,doctor,audit,replay,memory,demo,completion}", "unisono COMMAND --help", "unisono --version"]),
        (["launch", "--help"], ["unisono launch --processes 4 --restarts 3 train.py", "--processes INT", "(default: all GPUs"]),
        (["demo", "--help"], ["--epochs INT", "(default: 40 for digits, else 2)", "(default: digits)"]),
        (["doctor", "--help"], ["--json", "--processes", "--versions", "unisono launch --processes 2 -m unisono doctor"]),
        (
            ["replay", "--help"],
            ["unisono replay train.py --run run --step 1200", "--run DIRECTORY", "first whose loss is not finite"],
        ),
        (
            ["audit", "--help"],
            ["unisono audit --steps 50 train.py --epochs 10", "--processes INT,INT", "--against", "--html FILE"],
        ),
        (["memory", "--help"], ["unisono memory --replicas 1,4,16 train.py --epochs 10", "--replicas INT,INT", "--json"]),
        (["completion", "--help"], ["{bash,zsh}", "unisono completion bash >"]),
    ],
    ids=" ".join,
)
def test_help_says_what_to_write(capsys, words, parts):
    text = printed_by(capsys, *words)
    assert [part for part in parts if part not in text] == []
    assert "None" not in text


COMPLETED = """
source /dev/stdin
complete_words() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    COMPREPLY=()
    _tyro_unisono
    echo "${COMPREPLY[@]}"
}
complete_words unisono la
complete_words unisono launch --re
complete_words unisono do
complete_words unisono doctor --vers
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_subcommands_and_options(capsys):
    script = printed_by(capsys, "completion", "bash")
    done = subprocess.run(["bash", "-c", COMPLETED], input=script, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["launch", "--restarts", "doctor", "--versions"]


def test_zsh_has_a_script(capsys):
    script = printed_by(capsys, "completion", "zsh")
    assert script.startswith("#compdef unisono")
    assert "launch" in script


WITHOUT_JAX = """
import sys
sys.modules["jax"] = None
from unisono._src.tools import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit"], "unisono audit received no program"),
        (["audit", "absent.py"], "there is no script 'absent.py' here"),
        (["audit", "--devices", "two", __file__], "--devices takes whole numbers with commas between them, as in 1,2,8"),
        (["replay", "absent.py"], "unisono replay received no record"),
        (["memory"], "unisono memory received no program. Write: unisono memory script.py"),
    ],
)
def test_wrong_words_are_refused_before_jax_is_imported(words, message):
    done = python("-c", WITHOUT_JAX, *words)
    assert done.returncode == 2
    assert message in done.stderr
