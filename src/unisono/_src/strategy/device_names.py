"""TensorFlow's names of devices, as programs for `tf.distribute` pass them to a strategy: "/gpu:0", "GPU:1", "/device:CPU:0"."""

from __future__ import annotations

import re

NAME = re.compile(r"(?:.*/)?(?:device:)?(?P<kind>cpu|gpu|tpu):(?P<number>\d+)", re.IGNORECASE)


def translate_device_names(value: object) -> str | None:
    """Return the argument for these devices in JAX; None where `value` is neither a name of a device nor a list of names.

    >>> translate_device_names(["/gpu:0", "/gpu:1"]), translate_device_names("GPU:1"), translate_device_names(2)
    ('devices=2', 'devices=jax.devices("gpu")[1:2]', None)
    """
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        return None
    matches = [NAME.fullmatch(name) for name in names]
    if any(match is None for match in matches):
        return None
    devices = [(match["kind"].lower(), int(match["number"])) for match in matches if match is not None]
    kinds = {kind for kind, _ in devices}
    numbers = [number for _, number in devices]
    if len(kinds) > 1:
        return "devices=[" + ", ".join(f'jax.devices("{kind}")[{number}]' for kind, number in devices) + "]"
    kind = devices[0][0]
    first = numbers[0]
    last = numbers[-1]
    if kind != "cpu" and numbers == list(range(len(numbers))):
        return f"devices={len(numbers)}"
    all_of_kind = f'jax.devices("{kind}")'
    if numbers == list(range(first, last + 1)):
        return f"devices={all_of_kind}[{first or ''}:{last + 1}]"
    return f"devices=[{all_of_kind}[i] for i in {numbers}]"
