"""Refuse what would silently train something else.

The errors say what to write.
"""

from __future__ import annotations

import importlib.util

import keras

from unisono._src.keras.checks.jax_errors import check_optimizer_attributes
from unisono._src.keras.ownership import OwningStrategy, find_strategy
from unisono._src.keras.private.callbacks import list_callbacks
from unisono._src.keras.private.data_adapters import DataAdapter, PyDatasetAdapter, TFDatasetAdapter, get_tf_dataset
from unisono._src.keras.private.instances import set_untracked
from unisono._src.keras.private.models import find_eager_option, list_layers, overrides_method
from unisono._src.keras.private.optimizers import LossScaleOptimizer
from unisono._src.keras.private.trainer_state import find_stateless_scope
from unisono._src.keras.replica import random_keys
from unisono._src.keras.replica.trace_recorder import get_current_code
from unisono._src.processes import agreement
from unisono._src.programs.private.jaxprs import is_jit_disabled
from unisono._src.typing import UserObject


def check_compile_options(model: keras.Model, strategy: OwningStrategy) -> None:
    """Refuse options of compile() that have another way here."""
    steps = find_accumulation_steps(getattr(model, "optimizer", None))
    if steps:
        raise ValueError(
            f"The optimizer has gradient_accumulation_steps={steps}, but in a strategy accumulation is a placement: the global "
            f"batch is cut into replicas that one device can run one after another. Drop the argument, write "
            f"{type(strategy).__name__}(accumulate={steps}), and fit with batch_size={steps} times the one that you had."
        )
    check_layers(model, strategy)


def check_before_first_step(model: keras.Model, strategy: OwningStrategy) -> None:
    """Refuse, before the first step, what compile() did not see. It may have been changed since."""
    if keras.distribution.distribution() is not None:
        raise ValueError(
            f"Keras has a distribution of its own ({type(keras.distribution.distribution()).__name__}), and would place the batches "
            f"that {type(strategy).__name__} divides. Write keras.distribution.set_distribution(None), or train outside the scope."
        )
    if model.compiled:
        check_compile_options(model, strategy)
    else:
        check_layers(model, strategy)
    check_precision(model.variables, "The model has")


def check_measured_model(model: keras.Model, strategy: OwningStrategy) -> None:
    """Refuse a model whose memory is not known before its first step."""
    if find_strategy(model) is not strategy:
        raise ValueError(
            f"strategy.memory received the model {model.name!r}, which was not made in the scope of {strategy!r}. Make it there:\n\n"
            f"    with strategy.scope():\n        model = ..."
        )
    if not model.compiled:
        raise ValueError(
            f"strategy.memory received the model {model.name!r}, which is not compiled: the optimizer has a part of the memory. Write "
            f"model.compile(...) first."
        )
    if not model.built:
        raise ValueError(
            f"strategy.memory received the model {model.name!r}, which is not built, so that its weights have no shapes yet. Give it a "
            f"keras.Input, or write model.build((None, ...)) or model(x[:1]) first."
        )
    option = find_eager_option(model) or ("jax.disable_jit" if is_jit_disabled() else None)
    if option is not None:
        raise ValueError(
            f"strategy.memory received the model {model.name!r}, whose steps are not compiled ({option}): no program tells their memory. Leave "
            f"this option out."
        )


def check_changed_model(model: keras.Model, training: bool) -> None:
    """Refuse to train a model whose layers were frozen or freed. Its step was made before.

    Evaluation and prediction follow such a change; the optimizer cannot.
    """
    if training:
        raise ValueError(
            f"The variables of the model {model.name!r} are other ones than when it was compiled: layers were frozen, freed or "
            f"added. Write model.compile(...) again, so that the optimizer has the variables that are trained now."
        )


def check_made_function(model: keras.Model, step: str) -> None:
    """Refuse a class that makes the function of a loop itself.

    It would never be called. `step` is "train", "test" or "predict".
    """
    if overrides_method(model, f"make_{step}_function"):
        raise TypeError(
            f"The class {type(model).__name__} overrides make_{step}_function, but under a strategy the function is made by the strategy, and "
            f"the class's would not be called. Override {step}_step instead, or write a loop of your own."
        )


def check_layers(model: keras.Model, strategy: OwningStrategy) -> None:
    if strategy.num_replicas_in_sync > 1:
        for layer in list_layers(model):
            check_layer(layer, strategy.num_replicas_in_sync)


def check_layer(layer: keras.Layer, replicas: int) -> None:
    """Refuse, with more than one replica, a layer that remembers rows."""
    if isinstance(layer, keras.layers.RNN) and layer.stateful:
        raise ValueError(
            f"The layer {layer.name!r} is stateful: it carries a state for each row from batch to batch, and rows of {replicas} "
            f"replicas have no fixed place. Write stateful=False, or replicas=1."
        )


def find_accumulation_steps(optimizer: keras.optimizers.Optimizer | None) -> int | None:
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    optimizers = [inner, *(inner.optimizers if isinstance(inner, keras.optimizers.MultiOptimizer) else [])]
    return next((steps for each in optimizers if (steps := getattr(each, "gradient_accumulation_steps", None))), None)


def check_data_source(adapter: DataAdapter, steps: int | None) -> None:
    """Refuse data that never end, and data without a batch. This is checked before the first batch."""
    endless = isinstance(adapter, PyDatasetAdapter) and adapter.num_batches is None
    if isinstance(adapter, TFDatasetAdapter):
        check_auto_sharding(get_tf_dataset(adapter))
        endless = int(get_tf_dataset(adapter).cardinality()) == -1
    if endless and not steps:
        raise ValueError(
            "The dataset has no end, so an epoch would not end either. Write steps_per_epoch= (fit), validation_steps= (its "
            "validation data) or steps= (evaluate, predict)."
        )
    if adapter.num_batches == 0:
        raise ValueError("The dataset is empty: there is no batch to train on or to evaluate. Check how it was made or filtered.")


def check_auto_sharding(dataset: object) -> None:
    """Refuse a tf.data dataset that is divided by files, in several processes."""
    if agreement.get_agreement().is_alone:
        return
    options = getattr(dataset, "options", None)
    distribute = getattr(options(), "experimental_distribute", None) if callable(options) else None
    policy = getattr(distribute, "auto_shard_policy", None)
    if getattr(policy, "name", None) == "FILE":
        raise ValueError(
            "The dataset has AutoShardPolicy.FILE, by which each worker reads files of its own: which rows make up a global batch would "
            "then depend on the number of processes, and so would the bits. Every process is given the whole data, and computes the rows of its "
            "replicas. Leave the policy out, or write AutoShardPolicy.OFF."
        )


def check_backup_callbacks(callbacks: list[keras.callbacks.Callback]) -> None:
    """Refuse Keras' BackupAndRestore in several processes."""
    if not agreement.get_agreement().is_alone and any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise ValueError(
            "keras.callbacks.BackupAndRestore takes a training up in the process that wrote it, and the others would begin anew. Write "
            "un.callbacks.BackupAndRestore, which has the same arguments and takes up all."
        )


def check_tensorboard_callback(callbacks: UserObject) -> None:
    """Refuse Keras' TensorBoard where it cannot write. It needs TensorFlow, which no longer brings TensorBoard's package."""
    if not any(isinstance(each, keras.callbacks.TensorBoard) for each in list_callbacks(callbacks)):
        return
    for module, name in (("tensorflow", "TensorFlow"), ("tensorboard", "TensorFlow with the package tensorboard")):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                f"keras.callbacks.TensorBoard writes its files by {name}, which is not installed. Write un.callbacks.TensorBoard, which has "
                f'the same arguments and writes the same files without TensorFlow; it needs: pip install "unisono[tensorboard]"'
            )


def check_model_scope(model: keras.Model, strategy: OwningStrategy | None) -> None:
    """Refuse a model from outside of the scope that uses it. It is checked at compile() and fit()."""
    owner = find_strategy(model)
    if strategy is None or owner is strategy:
        return
    if owner is None:
        raise ValueError(
            f"The model {model.name!r} was made outside strategy.scope() and is used inside: its steps would run on one device, "
            f"undistributed. Make the model inside the scope:\n\n    with strategy.scope():\n        model = ...\n"
            f"    model.compile(...)"
        )
    raise ValueError(
        f"The model {model.name!r} was made in the scope of another strategy ({owner!r}) than the one in whose scope it is "
        f"used ({strategy!r}). A model belongs to the strategy in whose scope it was made; make it again in this scope."
    )


def check_precision(variables: list[keras.Variable], subject: str) -> None:
    doubles = [variable.path for variable in variables if variable.dtype == "float64"]
    if doubles:
        raise ValueError(
            f"{subject} variables of dtype float64 ({doubles[0]!r} among them), but gradients are summed in float32. Make the "
            f"model with float32."
        )


def check_replica_variables(variables: list[keras.Variable], strategy: OwningStrategy) -> None:
    """Refuse variables in replica code from outside of the strategy's scope."""
    owned = strategy.owned.variables
    others = [variable for variable in variables if id(variable) not in owned]
    if others:
        raise ValueError(
            f"Replica code of {strategy!r} uses {len(others)} variables that were not made in its scope: {others[0].path!r} "
            f"{'among them' if len(others) > 1 else 'alone'}. Make models, optimizers, metrics and variables inside:\n\n"
            f"    with strategy.scope():\n        model = ...\n        optimizer = ...\n        metric = ..."
        )
    check_precision(variables, "Replica code uses")
    used = {id(variable) for variable in variables}
    for layer in strategy.owned.layers if strategy.num_replicas_in_sync > 1 else ():
        if any(id(variable) in used for variable in layer.variables):
            check_layer(layer, strategy.num_replicas_in_sync)


def check_assigned_variables(variables: list[keras.Variable], strategy: OwningStrategy) -> None:
    """Refuse to assign a variable whose aggregation is not told.

    This is for variables of no layer: replicas' values must be combined.
    """
    in_layers = strategy.owned.layer_variable_ids
    unclear = [
        variable
        for variable in variables
        if id(variable) not in in_layers and variable.aggregation == "none" and not random_keys.is_seed_state(variable)
    ]
    if unclear and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"Replica code assigns {unclear[0].path!r}, a variable of your own, and each of {strategy.num_replicas_in_sync} replicas leaves "
            f'a value in it. Make it with aggregation="sum" (what the replicas add to it is added up), "mean" (averaged, by rows) or '
            f'"only_first_replica" (a counter of steps), or use a keras.metrics.Sum; or return the value and write strategy.reduce.'
        )


def check_dataset_replicas(replicas: int, strategy: OwningStrategy) -> None:
    """Refuse a dataset that is distributed to another number of replicas. It was given to fit, evaluate or predict."""
    if replicas != strategy.num_replicas_in_sync:
        raise ValueError(
            f"The dataset is distributed to {replicas} replicas, and the model belongs to {strategy!r}. Distribute it by the model's "
            f"strategy: strategy.distribute_dataset(dataset)."
        )


def check_run_scope(scope: object, strategy: object) -> None:
    """Refuse strategy.run in the scope of another strategy."""
    if scope is not strategy:
        raise ValueError(
            f"{strategy!r} is asked to run in the scope of {scope!r}. A step belongs to one strategy: write the run of the strategy in "
            f"whose scope it is."
        )


def check_outside_replica_code(call: str) -> None:
    """Refuse a strategy's method in replica code. It is for the code around `run`."""
    if get_current_code() is not None:
        raise RuntimeError(
            f"Replica code calls strategy.{call}, but a replica knows of its own rows alone. Return the value from the function, and call "
            f"strategy.{call} after strategy.run."
        )


def watch_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Check an optimizer at each `apply`. Attributes that do nothing are refused.

    An optimizer with a loss scale is for replica code: Keras can make its update only in a trace, and would leave it half done
    elsewhere.
    """

    def apply(*args: UserObject, **kwargs: UserObject) -> UserObject:
        check_optimizer_attributes(optimizer)
        outside = get_current_code() is None and find_stateless_scope() is None
        if outside and isinstance(optimizer, LossScaleOptimizer):
            raise ValueError(
                f"The optimizer {optimizer.name!r} has a loss scale and is applied outside of replica code, where gradients are those of a "
                f"loss without it. Apply it in the function that strategy.run gets; what has to happen to the gradients before that, return "
                f"from a first run and give to a second."
            )
        return type(optimizer).apply(optimizer, *args, **kwargs)

    set_untracked(optimizer, "apply", apply)
