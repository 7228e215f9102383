"""A line of source names the cause that it suggests, or none."""

from __future__ import annotations

import ast

import pytest

from unisono._src.audit.cause import Cause
from unisono._src.audit.suspects import find_suspect


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("rng = np.random.default_rng()", Cause.HOST_RANDOM),
        ("rng = np.random.default_rng(None)", Cause.HOST_RANDOM),
        ("amount = mixing.betavariate(0.4, 0.4)", Cause.HOST_RANDOM),
        ("key = jax.random.key(secrets.randbits(31))", Cause.HOST_RANDOM),
        ("passed = time.perf_counter() - begin", Cause.TIME),
        ("number = hash(name) % 16", Cause.HASH_ORDER),
        ("numbers = {name: n for n, name in enumerate(set(names))}", Cause.HASH_ORDER),
        ("table = [f.result() for f in as_completed(futures)]", Cause.THREAD_ORDER),
        ("means = np.loadtxt(kept)", Cause.FILES),
        ("rate = 0.1 * jax.device_count()", Cause.DEVICES),
        ("rng = np.random.default_rng(os.getpid())", Cause.PROCESS),
        ("number = int(os.environ.get('UNISONO_PROCESS', '0'))", Cause.PROCESS),
        ("loss = multihost_utils.process_allgather(loss).sum()", Cause.COLLECTIVE),
        ("rng = np.random.default_rng(0)", None),
        ("rng = random.Random(3)", None),
        ("y = np.sin(x).sum()", None),
        ("items = sorted(names)", None),
    ],
)
def test_a_line_suggests_a_cause(line, cause):
    assert find_suspect([ast.parse(line).body[0]]) is cause


def test_a_name_that_had_a_set_as_its_value_is_read_in_the_order_of_the_set():
    loop = ast.parse("for each in names: pass").body[0]
    assert isinstance(loop, ast.For)
    assert find_suspect([loop.target, loop.iter], {"names"}) is Cause.HASH_ORDER
    assert find_suspect([loop.target, loop.iter]) is None
