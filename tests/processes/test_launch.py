"""The parts of `unisono launch` that need no processes."""

from __future__ import annotations

import io
import signal

import pytest

from unisono._src.processes.launch import worker_environment
from unisono._src.processes.launch.launch import count_next_processes
from unisono._src.processes.launch.outcome import ProcessEnd, count_own_failures, find_first_failure
from unisono._src.processes.launch.output import CLEAR, NO_WRAPPING, WRAPPING, Screen, WorkerOutput, find_last_traceback
from unisono._src.processes.launch.target import seems_to_save, split_command_line
from unisono._src.processes.launch.worker_environment import WorkerDevices, list_gpus, make_worker_environment
from unisono._src.tools import cli


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("words", "options", "program"),
    [
        (["--processes", "2", "a.py", "--processes", "3"], ["--processes", "2"], ["a.py", "--processes", "3"]),
        (["--processes=2", "--cpu", "a.py"], ["--processes=2", "--cpu"], ["a.py"]),
        (["--processes", "2", "-m", "a.b", "-m", "x"], ["--processes", "2"], ["-m", "a.b", "-m", "x"]),
        (["--processes", "2", "--", "-odd.py", "--"], ["--processes", "2"], ["-odd.py", "--"]),
        (["--help"], ["--help"], []),
        ([], [], []),
    ],
)
def test_what_stands_after_the_program_is_its_own(words, options, program):
    assert split_command_line(words, ["--cpu", "--help"]) == (options, program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "0", __file__], "--processes must be 1 or more; received 0."),
        (["--processes", "2", "--devices-per-process", "0", __file__], "--devices-per-process must be 1 or more; received 0."),
        (["--processes", "2", "--restarts", "-1", __file__], "--restarts must be 0 or more; received -1."),
        (["--processes", "2", "--bound", "0", __file__], "--bound is a number of seconds above 0; received 0."),
        (["--processes", "2", "--bound", "inf", __file__], "--bound is a number of seconds above 0; received inf."),
        (["--processes", "2", "--min-processes", "3", __file__], "--min-processes 3 is more than --processes 2."),
        (
            ["--processes", "2"],
            "unisono launch received no program. Write: unisono launch --processes 2 script.py, or with a module "
            "unisono launch --processes 2 -m package.module",
        ),
        (
            ["--processes", "2", "gone.py", "--cpu"],
            "there is no script 'gone.py' here. Options of unisono launch come before the script's name.",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["launch", *options])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"unisono: {message}\n"


def shown(process: int, *chunks: bytes, terminal: bool = False) -> str:
    to = Terminal() if terminal else io.StringIO()
    stream = WorkerOutput(Screen(to, to), to, process)
    for chunk in chunks:
        stream.feed(chunk)
    stream.close()
    return to.getvalue()


BAR = (b"Epoch 1/2\n", b"\r 1/3 bar", b"\b\b\b\r 2/3 bar", b"\b\b\b\r 3/3 bar \n", b"after\n")


def test_lines_have_the_process_in_front_and_a_bar_ends_as_one_line():
    assert shown(0, *BAR) == "[0] Epoch 1/2\n[0]  3/3 bar \n[0] after\n"
    assert shown(1, *BAR) == "[1] Epoch 1/2\n[1] after\n"
    assert shown(1, b"wind", b"ows\r", b"\nno end") == "[1] windows\n[1] no end\n"
    assert shown(0, "é".encode()[:1], "é".encode()[1:], b"\n") == "[0] é\n"
    assert shown(0, b"a\r", b"b\r", b"c\r", b"\n") == "[0] c\n"


def test_a_terminal_sees_the_bar_of_process_0_move():
    assert shown(1, *BAR, terminal=True) == "[1] Epoch 1/2\n[1] after\n"
    moving = "".join(f"{CLEAR}{NO_WRAPPING}[0]  {i}/3 bar{WRAPPING}" for i in (1, 2))
    assert shown(0, *BAR, terminal=True) == f"[0] Epoch 1/2\n{moving}{CLEAR}[0]  3/3 bar \n[0] after\n"


def test_a_line_of_another_process_comes_above_the_bar():
    to = Terminal()
    screen = Screen(to, to)
    first, second = WorkerOutput(screen, to, 0), WorkerOutput(screen, to, 1)
    first.feed(b"\rbar")
    second.feed(b"line\n")
    bar = f"{CLEAR}{NO_WRAPPING}[0] bar{WRAPPING}"
    assert to.getvalue() == f"{bar}{CLEAR}[1] line\n{bar}"


def test_the_last_traceback_comes_with_those_it_came_from():
    begin, chain = "Traceback (most recent call last):", "During handling of the above exception, another exception occurred:"
    first, second = [begin, "  File a", "KeyError: 1"], [begin, "  File b", "ValueError: 2"]
    assert find_last_traceback(["x", *first, "between", *second, "end"]) == [*second, "end"]
    assert find_last_traceback(["x", *first, "", chain, "", *second]) == [*first, "", chain, "", *second]
    assert find_last_traceback(["x"]) == []


def end(process, code, killed=None, forced=False, words=()):
    assert killed is None or code == 128 + killed
    return ProcessEnd(process, code if killed is None else -killed, forced, words)


@pytest.mark.parametrize(
    ("ends", "code", "first", "lost"),
    [
        ([end(0, 0), end(1, 0)], 0, None, 0),
        ([end(0, 75), end(1, 0)], 75, None, 0),
        ([end(1, 76), end(0, 3), end(2, 76)], 3, "process 0 failed with exit code 3", 1),
        ([end(1, 134, signal.SIGABRT), end(0, 137, signal.SIGKILL)], 137, "process 0 was killed by SIGKILL", 2),
        ([end(1, 76), end(0, 134, signal.SIGABRT)], 134, "process 0 was killed by SIGABRT", 1),
        ([end(1, 76), end(0, 137, signal.SIGKILL, True)], 137, "process 0 did not end by itself, and was ended", 1),
        ([end(1, 1), end(0, 1), end(2, 137, signal.SIGKILL, True)], 1, "process 1 failed with exit code 1", 2),
        ([end(0, 75), end(1, 137, signal.SIGKILL, True)], 137, "process 1 did not end by itself, and was ended", 1),
    ],
)
def test_the_first_failure_is_no_consequence_of_another(ends, code, first, lost):
    failure = find_first_failure(ends)
    assert (None if failure is None else str(failure)) == first
    assert (max(end.code for end in ends) if failure is None else failure.code) == code
    assert failure is None or count_own_failures(ends) == lost


def test_how_many_are_started_again():
    two_lost = [end(0, 1), end(1, 137, signal.SIGKILL), end(2, 76), end(3, 76)]
    assert [count_next_processes(4, two_lost, least) for least in (None, 1, 2, 3, 4)] == [4, 2, 2, 3, 4]


def test_devices_are_divided():
    gpus = tuple("abcde")
    assert [WorkerDevices(None, False, gpus).make_variables(i, 2) for i in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "a,b,c"}, {"CUDA_VISIBLE_DEVICES": "d,e"}]  # fmt: skip
    assert [WorkerDevices(2, False, gpus).make_variables(i, 2)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["a,b", "c,d"]
    assert WorkerDevices(2, True, gpus).make_variables(0, 2) == {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    assert WorkerDevices(2, False).make_variables(0, 2) == {"JAX_NUM_CPU_DEVICES": "2"}
    assert WorkerDevices(None, False).make_variables(0, 2) == {}
    with pytest.raises(
        ValueError, match=r"^2 processes with 3 devices each need 6 GPUs, and there are 5: a,b,c,d,e. Write fewer, or --cpu.$"
    ):
        WorkerDevices(3, False, gpus).make_variables(0, 2)
    with pytest.raises(
        ValueError, match=r"^6 processes cannot share 5 GPUs: a,b,c,d,e. Write --processes 5 or fewer, or --cpu.$"
    ):
        WorkerDevices(None, False, gpus).make_variables(0, 6)


def test_gpus_are_those_that_are_visible(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_environment, "GPUS", tmp_path / "none")
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "0, 3,GPU-1f"}) == ("0", "3", "GPU-1f")
    assert list_gpus({"CUDA_VISIBLE_DEVICES": ""}) == list_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("0,-1,1", "0"), ("0,,1", "0"), ("MIG-1/2/3,none,0", "MIG-1/2/3"), ("2,1,4,0", "2,1"), ("1,1", ""), ("NoDevFiles", "")],
)
def test_gpus_after_an_invalid_name_are_not_visible(visible, seen, tmp_path, monkeypatch):
    """As in CUDA. Of four GPUs, the last is number 3."""
    for name in "abcd":
        (tmp_path / name).touch()
    monkeypatch.setattr(worker_environment, "GPUS", tmp_path)
    assert ",".join(list_gpus({"CUDA_VISIBLE_DEVICES": visible})) == seen
    assert list_gpus({}) == ("0", "1", "2", "3")


def test_what_the_environment_of_a_worker_says():
    base = {
        "A": "1", "TF_CONFIG": "{}", "KERAS_BACKEND": "torch", "https_proxy": "http://proxy", "no_proxy": "local",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to=/x",
    }  # fmt: skip
    made = make_worker_environment(base, 1, 3, 4711, WorkerDevices(2, True), restarts=1, bound=7.5)
    assert made == {
        "A": "1", "KERAS_BACKEND": "jax", "https_proxy": "http://proxy", "no_proxy": "local", "no_grpc_proxy": "local,127.0.0.1",
        "JAX_CHECK_PROXY_ENVS": "0", "XLA_FLAGS": "--xla_dump_to=/x", "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:4711", "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:4711",
        "UNISONO_COORDINATOR": "127.0.0.1:4711", "UNISONO_PROCESSES": "3", "UNISONO_PROCESS": "1", "UNISONO_RESTARTS": "1",
        "UNISONO_BOUND": "7.5",
    }  # fmt: skip


def test_what_seems_to_save(tmp_path, monkeypatch):
    script = tmp_path / "train_here.py"
    monkeypatch.chdir(tmp_path)
    for source, saves in (("model.fit(x)", False), ("un.callbacks.BackupAndRestore(d)", True), ("c = un.Checkpoint(m=m)", True)):
        script.write_text(source)
        assert seems_to_save((str(script),)) is saves
        assert seems_to_save(("-m", "train_here")) is saves
    assert seems_to_save(("-m", "no_such_module_anywhere"))
