"""A strategy as the owner of Keras objects from its scope."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, TypeVar

import jax
import keras

from unisono._src.keras.private.compiled_losses import list_all_metrics
from unisono._src.keras.private.instances import set_untracked
from unisono._src.placement import Placement
from unisono._src.typing import UserObject

T = TypeVar("T")


class WeakIdentitySet:
    """A set of objects by weak references. It tells objects apart by identity."""

    def __init__(self) -> None:
        self._members: dict[int, weakref.ref[Any]] = {}

    def add(self, member: object) -> None:
        key = id(member)
        members = self._members  # the callback must not keep the set alive
        members[key] = weakref.ref(member, lambda _: members.pop(key, None))

    def __contains__(self, candidate: object) -> bool:
        reference = self._members.get(id(candidate))
        return reference is not None and reference() is candidate

    def list_members(self) -> list[UserObject]:
        return [member for reference in list(self._members.values()) if (member := reference()) is not None]


class OwnedObjects(WeakIdentitySet):
    """The layers, optimizers, metrics and variables of a strategy."""

    def __init__(self) -> None:
        super().__init__()
        self._models = WeakIdentitySet()
        """The models among them. Every run of a loop asks for them."""

    def add(self, member: UserObject) -> None:
        super().add(member)
        if isinstance(member, keras.Model):
            self._models.add(member)

    @property
    def layers(self) -> list[keras.Layer]:
        return self._find(keras.Layer)

    @property
    def models(self) -> list[keras.Model]:
        return self._models.list_members()

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers, including those of compiled models."""
        of_models = [getattr(model, "optimizer", None) for model in self.models]
        optimizers = [*self._find(keras.optimizers.Optimizer), *(optimizer for optimizer in of_models if optimizer is not None)]
        return list({id(optimizer): optimizer for optimizer in optimizers}.values())

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics, including those of compiled models."""
        of_models = [metric for model in self.models for metric in list_all_metrics(model)]
        return list({id(metric): metric for metric in [*self._find(keras.metrics.Metric), *of_models]}.values())

    @property
    def variables(self) -> set[int]:
        """The ids of all variables of the scope. They were made there, or belong to an object that was made there."""
        holders = [*self._find(keras.Layer), *self.optimizers, *self.metrics]
        made = {id(variable) for variable in self._find(keras.Variable)}
        return made | {id(variable) for holder in holders for variable in holder.variables}

    @property
    def layer_variable_ids(self) -> set[int]:
        """The ids of the layers' and metrics' variables."""
        holders = [*self._find(keras.Layer), *self.metrics]
        return {id(variable) for holder in holders for variable in holder.variables}

    def _find(self, kind: type[T]) -> list[T]:
        """Find the objects of a class."""
        return [made for made in self.list_members() if isinstance(made, kind)]


class OwningStrategy:
    """A strategy as rooms below the loop know it. It has R replicas on devices, and owns what is made in its scope."""

    def __init__(self, deterministic: bool, shard: str | None = None) -> None:
        self.deterministic = deterministic
        self.shard = shard
        """The part of the state that lies cut over the devices. None if all of it lies whole on each."""
        self.has_cut = False
        """Whether a training has had weights that lie cut."""
        self.owned = OwnedObjects()
        _strategies.add(self)

    _placement: Placement | None = None
    """The placement, once the devices were looked up."""

    @property
    def placement(self) -> Placement:
        """The placement of the replicas. Its first use looks the devices up, which starts JAX."""
        if self._placement is None:
            self._placement = self._choose_placement()
        return self._placement

    def _start(self) -> None:
        """Look the devices up, unless that was done. They are refused if they do not fit the arguments."""
        _ = self.placement

    def _choose_placement(self) -> Placement:
        """Place the replicas on the devices that JAX has."""
        raise NotImplementedError

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of logical replicas."""
        return self.placement.replicas

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that run the replicas, in contiguous blocks."""
        return self.placement.devices


_strategies: weakref.WeakSet[OwningStrategy] = weakref.WeakSet()


def find_strategy(created: object) -> OwningStrategy | None:
    """Find the strategy in whose scope an object was made. None outside of every scope."""
    return next((strategy for strategy in list(_strategies) if created in strategy.owned), None)


class ModelBond(Protocol):
    """The bond between a model and its strategy.

    The model was made in the strategy's scope. Rooms below `fit` know this part of the bond.
    """

    ran_eagerly: bool
    """Whether steps that were not compiled have changed the model."""

    @property
    def has_promised_bits(self) -> bool:
        """Whether every run of the program gives the model the same bits."""
        ...


BOND = "_unisono"
"""The attribute for the bond, on a model that was made in a scope."""


def find_bond(model: object) -> ModelBond | None:
    """Find the bond of a model. None for a model from outside of every scope."""
    return vars(model).get(BOND)


def set_bond(model: object, bond: ModelBond) -> None:
    set_untracked(model, BOND, bond)
