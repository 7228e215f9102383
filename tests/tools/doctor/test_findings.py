"""What `unisono doctor` finds on machines of all kinds, and what it says to write."""

from __future__ import annotations

import json

import pytest

from unisono._src.engine.xla import determinism, device_kind, runtime
from unisono._src.kernels.native import library
from unisono._src.kernels.native.library import Kernels
from unisono._src.programs.private import backends
from unisono._src.tools.doctor import cluster, cores, installation, settings
from unisono._src.tools.doctor.finding import (
    Finding,
    PromiseVerdict,
    compute_exit_code,
    format_findings,
    format_verdict,
    make_json_record,
    read_finding,
    run_check,
)
from unisono._src.tools.doctor.placements import compare_placements, make_environment

OK = PromiseVerdict.OK
NOTE = PromiseVerdict.NOTE
BREAKS = PromiseVerdict.BREAKS
UNSEEN = PromiseVerdict.UNSEEN


def only(findings):
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("version", "verdict", "advice"),
    [
        ("3.15.1", OK, ""),
        ("3.15.99", NOTE, ""),
        ("3.16.0", BREAKS, "pip install 'keras>=3.15.0,<3.16'"),
        (None, BREAKS, "pip install 'keras>=3.15.0,<3.16'"),
    ],
)
def test_versions_are_judged_by_the_window(version, verdict, advice, monkeypatch):
    monkeypatch.delenv("UNISONO_VERSIONS", raising=False)
    monkeypatch.setattr(installation, "find_version", lambda package: version)
    finding = installation.examine_release(next(window for window in installation.WINDOWS if window.package == "keras"))
    assert (finding.verdict, finding.advice) == (verdict, advice)


def test_a_package_that_is_not_installed_is_found():
    assert installation.find_version("no-such-package-of-ours") is None
    assert {finding.subject for finding in installation.examine_libraries()} == {"unisono", "keras", "jax", "jaxlib", "numpy"}


@pytest.mark.parametrize(
    ("flags", "has_gpu", "verdict", "words"),
    [
        ("", False, OK, "not needed"),
        ("", True, OK, "a strategy adds --xla_gpu_deterministic_ops=true before JAX starts; not by"),
        (
            "--xla_gpu_deterministic_ops",
            True,
            OK,
            "is set; not by flags: the kernels of another driver",
        ),
        ("--xla_gpu_deterministic_ops=false", True, BREAKS, "something else than --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=false", False, NOTE, "something else than --xla_gpu_deterministic_ops=true"),
    ],
)
def test_a_gpu_without_the_flag_breaks_the_promise(flags, has_gpu, verdict, words, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(determinism, "can_find_gpu", lambda: has_gpu)
    finding = only(settings.examine_gpu_flags())
    assert finding.verdict == verdict
    assert words in finding.fact
    assert ("XLA_FLAGS='--xla_gpu_deterministic_ops=true'" in finding.advice) == (verdict != OK)


def test_excess_precision_is_read_from_the_options_of_the_compiler(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert only(settings.examine_excess_precision()).verdict == OK
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=true")
    assert "holds for other programs alone" in only(settings.examine_excess_precision()).fact
    monkeypatch.setattr(determinism, "get_compiler_options", lambda platform: {})
    assert only(settings.examine_excess_precision()).verdict == BREAKS


@pytest.mark.parametrize(
    ("variable", "cores", "verdict", "words"),
    [
        (None, 4, OK, "4 on 4 cores"),
        (None, 1, OK, "1 core; a strategy has JAX start 2 threads"),
        ("2", 1, OK, "2 on 1 core;"),
        ("1", 4, BREAKS, "PJRT_NPROC=1: for one thread alone"),
    ],
)
def test_one_thread_alone_breaks_the_promise(variable, cores, verdict, words, monkeypatch):
    monkeypatch.setattr(runtime, "count_cores", lambda: cores)
    monkeypatch.setattr(runtime, "has_jax_started", lambda: False)
    monkeypatch.setattr(runtime, "count_requested_cpu_devices", lambda: -1)
    monkeypatch.delenv(backends.THREADS_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(backends.THREADS_VARIABLE, variable)
    finding = only(settings.examine_threads())
    assert finding.verdict == verdict
    assert words in finding.fact


def test_switches_of_tensorflow_and_jax_are_told(monkeypatch):
    assert list(settings.examine_tensorflow_switch()) == []
    monkeypatch.setenv("TF_DETERMINISTIC_OPS", "0")
    assert only(settings.examine_tensorflow_switch()).verdict == BREAKS
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2 --xla_gpu_deterministic_ops=true")
    finding = only(settings.examine_other_flags())
    assert (finding.verdict, finding.fact.split(":")[0]) == (NOTE, "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("XLA_FLAGS", "")
    assert list(settings.examine_other_flags()) == []
    monkeypatch.setattr(settings, "settings", type("", (), {"jax_enable_x64": True, "jax_default_matmul_precision": "highest"}))
    assert [finding.subject for finding in settings.examine_jax_settings()] == ["jax_enable_x64", "matmul precision"]


CORE = "processor\t: {}\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 151\nflags\t\t: fpu avx2 fma {}\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes this machine one of cores: for each, its L2 cache, further instructions and speed. The process may use those in `allowed`."""

    def make(described, allowed=None):
        (tmp_path / "cpuinfo").write_text("\n".join(CORE.format(number, more) for number, (_, more, _) in enumerate(described)))
        for number, (cache, _, speed) in enumerate(described):
            files = {"cache/index0/level": "2", "cache/index0/type": "Unified", "cache/index0/size": cache}
            for name, value in (files | {"cpufreq/cpuinfo_max_freq": speed}).items():
                path = tmp_path / "cpu" / f"cpu{number}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{value}\n")
        monkeypatch.setattr(library, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(device_kind, "CORES", tmp_path / "cpu")
        monkeypatch.setattr(cores, "list_allowed_cores", lambda: list(range(len(described)) if allowed is None else allowed))
        return list(cores.examine_cores())

    return make


FAST = ("1280K", "", "5000000")
SMALL = ("2048K", "", "3800000")


def test_cores_of_one_kind_keep_the_promise(machine):
    assert only(machine([FAST] * 2)).fact == "2 of one kind: GenuineIntel 6 151, caches 1280K"
    slower = machine([FAST, ("1280K", "", "4000000")])
    assert [(finding.subject, finding.verdict) for finding in slower] == [("cores", OK), ("speeds", NOTE)]


def test_cores_that_are_not_alike_break_the_promise(machine):
    finding = only(machine([FAST, FAST, FAST, SMALL, SMALL]))
    assert finding.verdict == BREAKS
    assert "2 kinds: cores 0-2 GenuineIntel 6 151, caches 1280K; cores 3-4 GenuineIntel 6 151, caches 2048K" in finding.fact
    assert finding.advice.startswith("taskset --cpu-list 0-2 python ...")
    finding = only(machine([FAST, ("1280K", "avx512f", "5000000")]))
    assert "and avx512f" in finding.fact


def test_what_the_advice_says_mends_it(machine):
    assert only(machine([FAST, FAST, SMALL], allowed=[0, 1])).verdict == OK


def test_a_system_that_tells_nothing_of_its_cores_is_noted(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "CPUINFO", tmp_path / "none")
    assert only(cores.examine_cores()).verdict == NOTE


def test_kernels_are_told(monkeypatch):
    monkeypatch.setattr(installation, "load_kernels", lambda: Kernels("avx2", "0123"))
    assert only(installation.examine_kernels()).fact == "level avx2, build 0123"
    monkeypatch.setattr(installation, "load_kernels", lambda: Kernels(None, None, "no C++ compiler was found"))
    finding = only(installation.examine_kernels())
    assert (finding.verdict, finding.advice) == (NOTE, "install a C++ compiler (g++), and Unisono again")
    monkeypatch.setattr(installation, "load_kernels", lambda: Kernels(None, None, "UNISONO_NATIVE=0"))
    assert only(installation.examine_kernels()).advice == "leave UNISONO_NATIVE out"
    monkeypatch.setattr(installation, "load_kernels", library.choose_level)
    monkeypatch.setenv("UNISONO_NATIVE", "yes")
    finding = only(installation.examine_kernels())
    assert (finding.verdict, finding.fact) == (BREAKS, "UNISONO_NATIVE=yes is none of 0, 1, avx512, avx2, neon.")


FACTS = {"host": "a", "jax": "0.10.2", "XLA_FLAGS": "", "caches": "32K"}


def test_processes_that_differ_break_the_promise():
    alike = only(cluster.compare_processes([FACTS, FACTS | {"host": "b"}]))
    assert (alike.verdict, alike.fact.split(":")[0]) == (OK, "2 processes on 2 machines")
    differing = list(cluster.compare_processes([FACTS, FACTS, FACTS | {"jax": "0.12.0.1", "XLA_FLAGS": "--x=1"}]))
    assert [(finding.subject, finding.fact) for finding in differing] == [
        ("XLA_FLAGS", "--x=1 in process 2, none in process 0"),
        ("jax", "0.12.0.1 in process 2, 0.10.2 in process 0"),
    ]
    assert {finding.verdict for finding in differing} == {BREAKS}


def trained(placement, *steps, **variables):
    return {"placement": placement, "steps": list(steps), "variables": variables, "seconds": 1.0}


def test_placements_that_part_are_told_by_step_and_variable():
    one = trained("1 device", "a", "b", "c", kernel="1", bias="2")
    compared = compare_placements(
        [one, one | {"placement": "2 devices"}, trained("4 devices", "a", "x", "y", kernel="3", bias="2")]
    )
    assert [finding.verdict for finding in compared] == [OK, OK, BREAKS]
    assert compared[2].fact == "y parts at step 2 of 3, in kernel"


def test_the_self_test_runs_alone_and_keeps_nothing():
    made = make_environment(
        {"UNISONO_PROCESSES": "2", "TF_CONFIG": "{}", "RANK": "1", "XLA_FLAGS": "--x", "JAX_ENABLE_COMPILATION_CACHE": "1"}
    )
    assert made == {
        "XLA_FLAGS": "--x",
        "UNISONO_PROCESSES": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "KERAS_BACKEND": "jax",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def test_what_cannot_be_looked_at_is_a_finding():
    def check():
        raise OSError("no such file")

    findings = run_check("processor", "cores", check)
    assert findings == [Finding("processor", "cores", "OSError: no such file", UNSEEN)]


def make_finding(verdict, advice=""):
    return Finding("settings", "flags", "a fact", verdict, advice)


@pytest.mark.parametrize(
    ("verdicts", "code", "words"),
    [
        ([OK, NOTE], 0, "Nothing breaks the promise of the same bits here; 1 note."),
        ([OK, BREAKS, UNSEEN], 1, "1 breaks the promise of the same bits here; 1 could not be looked at."),
        ([BREAKS, BREAKS], 1, "2 break the promise of the same bits here."),
        ([OK, UNSEEN], 2, "Nothing breaks the promise of the same bits here; 1 could not be looked at."),
    ],
)
def test_the_exit_code_and_the_last_line_say_the_worst(verdicts, code, words):
    findings = [make_finding(verdict) for verdict in verdicts]
    assert compute_exit_code(findings) == code
    assert format_verdict(findings).strip() == words


def test_the_table_has_a_line_for_each_fact_and_what_to_write():
    text = format_findings([make_finding(OK), make_finding(BREAKS, "XLA_FLAGS=''"), Finding("devices", "CPU", "a fact")])
    assert text.splitlines() == [
        "", "settings", "  ok      flags: a fact", "  breaks  flags: a fact", "          write: XLA_FLAGS=''",
        "", "devices", "  ok      CPU: a fact",
    ]  # fmt: skip


def test_findings_survive_json():
    findings = [make_finding(BREAKS, "write this"), make_finding(OK)]
    record = json.loads(json.dumps(make_json_record(findings, [])))
    assert record["exit_code"] == 1
    assert [read_finding(one) for one in record["findings"]] == findings
