"""Functions of JAX with types for what they take and return.

JAX 0.10 has no annotations for some of them, and types function arguments of others as anything. A checker then knows nothing of their
results, nor of the arguments of a lambda.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import Sharding

from unisono._src.typing import Array, PyTree, UserFunction

T = TypeVar("T")


class MapTree(Protocol):
    """`jax.tree.map`."""

    @overload
    def __call__(self, function: Callable[[PyTree], PyTree], tree: PyTree, /) -> PyTree: ...
    @overload
    def __call__(self, function: Callable[[PyTree, PyTree], PyTree], tree: PyTree, second: PyTree, /) -> PyTree: ...
    @overload
    def __call__(self, function: UserFunction, /, *trees: PyTree, is_leaf: Callable[[PyTree], bool] | None = None) -> PyTree: ...


class Identity(Protocol):
    """A function that returns the tree that it takes."""

    def __call__(self, tree: T, /) -> T: ...


class ForiLoop(Protocol):
    """`lax.fori_loop`."""

    def __call__(self, lower: int | Array, upper: int | Array, body: Callable[[Array, T], T], start: T, /) -> T: ...


class MapRows(Protocol):
    """`lax.map`."""

    def __call__(self, function: Callable[[Array], T], rows: Array, /) -> T: ...


class Jit(Protocol):
    """`jax.jit`, without its options for arguments."""

    @overload
    def __call__(self, function: Callable[[PyTree], T], /, *, out_shardings: Sharding = ...) -> Callable[[PyTree], T]: ...
    @overload
    def __call__(
        self,
        function: Callable[..., T],
        /,
        *,
        donate_argnums: tuple[int, ...] = ...,
        compiler_options: dict[str, str | bool] = ...,
    ) -> Callable[..., T]: ...


class Settings(Protocol):
    """The settings of JAX that Unisono reads."""

    jax_compilation_cache_dir: str | None
    jax_default_matmul_precision: str | None
    jax_disable_jit: bool
    jax_enable_compilation_cache: bool
    jax_enable_x64: bool
    jax_num_cpu_devices: int
    jax_threefry_partitionable: bool


all_gather: Callable[..., Array] = lax.all_gather
psum: Callable[[Array, str], Array] = lax.psum
all_to_all: Callable[..., Array] = lax.all_to_all
block_until_ready: Identity = jax.block_until_ready
device_put: Callable[[PyTree, jax.Device | Sharding | None], PyTree] = jax.device_put
take_index: Callable[..., Array] = lax.dynamic_index_in_dim
update_index: Callable[..., Array] = lax.dynamic_update_index_in_dim
eval_shape: Callable[..., PyTree] = jax.eval_shape
finfo: Callable[[np.dtype], np.finfo] = jnp.finfo
fori_loop: ForiLoop = lax.fori_loop
grad: Callable[..., Callable[..., PyTree]] = jax.grad
jaxpr_as_fun: Callable[[core.ClosedJaxpr], UserFunction] = core.jaxpr_as_fun
jit: Jit = jax.jit
make_jaxpr: Callable[[UserFunction], Callable[..., core.ClosedJaxpr]] = jax.make_jaxpr
make_jaxpr_and_shape: Callable[..., Callable[..., tuple[core.ClosedJaxpr, PyTree]]] = partial(jax.make_jaxpr, return_shape=True)
mark_value: Callable[[Array, str], Array] = checkpoint_name
map_rows: MapRows = lax.map
map_tree: MapTree = jax.tree.map
optimization_barrier: Identity = lax.optimization_barrier
pad: Callable[[Array, Sequence[tuple[int, int]]], Array] = jnp.pad
ppermute: Callable[..., Array] = lax.ppermute
vjp: Callable[..., tuple[PyTree, Callable[[PyTree], PyTree]]] = jax.vjp
wrap_key_data: Callable[..., Array] = jax.random.wrap_key_data

settings = cast("Settings", jax.config)


def is_ready(array: Array) -> bool:
    """Whether a device has computed an array."""
    return bool(array.is_ready())  # pyright: ignore[reportAttributeAccessIssue]  # JAX documents it, and leaves it out of the class
