"""Verification: no bit is another by it, and a device that computes wrong bits is found and named, once or always."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import families
import unisono as un
from sizes import cases, mostly_slow, slow
from small_training import REPLICAS, WEIGHTS, Training
from unisono._src.engine.exchange import LeadExchange
from unisono._src.engine.observers.device_verification import DeviceVerification
from unisono._src.engine.observers.verified_steps import LoneReplicas
from unisono._src.engine.state import get_step_count
from unisono._src.placement import Placement


@pytest.mark.parametrize("family", mostly_slow(families.FAMILIES, "normalized"))
@pytest.mark.parametrize("devices", [4, *slow(2)])
def test_no_bit_is_another(family, devices):
    prints = set()
    for verify in cases((None, 1 / 3), (None, 1 / 3, 1)):
        keras.utils.set_random_seed(0)
        with un.MirroredStrategy(devices=devices, replicas=4, verify=verify).scope():
            model, compiled, data = families.FAMILIES[family]()
        model.compile(**compiled)
        model.fit(**data, batch_size=families.BATCH, epochs=1, verbose=0)
        prints.add(un.fingerprint(model))
    assert len(prints) == 1


@given(st.fractions(Fraction(1, 1000), 1), st.integers(0, 10**6))
def test_the_share_of_steps_is_as_asked(rate, step):
    """Which steps these are depends on their numbers alone."""
    verification = DeviceVerification(rate, Placement(4, (None,) * 2))  # pyright: ignore[reportArgumentType]  # no device is asked
    until = verification.count_unverified(step)
    assert 0 <= until <= 1 / rate
    assert verification.count_unverified(step + until) == 0
    if until:
        assert verification.count_unverified(step + 1) == until - 1
    due = sum(verification.count_unverified(number) == 0 for number in range(200))
    assert abs(due - 200 * rate) <= 1


class Twins:
    """A training that is verified, and its twin, which no fault befalls."""

    def __init__(self, devices):
        self.verified, self.twin = (
            Training(un.MirroredStrategy(devices=devices, replicas=REPLICAS, verify=verify)) for verify in (1, None)
        )
        self.step()  # makes the optimizer's variables, which a fingerprint covers

    def step(self):
        """Train both, the twin only if the first made its step; return the error of the first."""
        error = None
        try:
            self.verified.step()
        except un.DeviceFaultError as raised:
            error = raised
        if error is None or "The step was not made" not in str(error):
            self.twin.step()
        return error

    @property
    def is_sound(self):
        return un.fingerprint(self.verified.model) == un.fingerprint(self.twin.model)


class Fault:
    """A bit that a device flips in what it computes: once, or always, and then also in the sum of its replicas in the step that verifies it."""

    def __init__(self, monkeypatch, device, always, seed):
        draw = random.Random(seed)
        self.flips, self._step = 0, -1
        bit, place = draw.randrange(32), draw.random()
        whole, bring = LoneReplicas._take_contribution, LeadExchange._bring_to_lead

        def flip(contribution):
            self.flips += 1
            vector = np.array(contribution["float32"])
            vector.view("uint32")[int(place * WEIGHTS)] ^= np.uint32(1 << bit)
            return contribution | {"float32": vector}

        def take(replicas, index, sums):
            contribution = whole(replicas, index, sums)
            if index != device or (self.flips and not always):
                return contribution
            self._step = get_step_count().steps
            return jax.device_put(flip(contribution), jax.devices()[index])

        def bring_wrong(exchange, sums):
            parts = list(bring(exchange, sums))
            if always and self._step == get_step_count().steps:
                parts[device] = flip(parts[device])
            return parts

        monkeypatch.setattr(LoneReplicas, "_take_contribution", take)
        monkeypatch.setattr(LeadExchange, "_bring_to_lead", bring_wrong)


@pytest.fixture(scope="module")
def on_three():
    return Twins(3)


@pytest.fixture(scope="module")
def on_two():
    training = Twins(2)
    training.step()
    return training


@pytest.mark.parametrize("seed", range(cases(6, 100)))
def test_a_flipped_bit_is_found_and_attributed(on_three, monkeypatch, seed):
    device, always = seed % 3, seed % 2 == 1
    with monkeypatch.context() as patch:
        fault = Fault(patch, device, always, seed)
        errors = [error for _ in range(4) if (error := on_three.step()) is not None]
        assert fault.flips
    for error in errors:
        assert str(error).startswith(f"Device {device} (")
        assert ("It computes wrong bits again" in str(error)) == always
        assert ("The step was not made" in str(error)) == always
    assert len(errors) >= 1 if always else len(errors) == 1
    assert on_three.is_sound


def test_what_the_error_says(on_three, monkeypatch):
    get_step_count().steps = 41
    with monkeypatch.context() as patch:
        Fault(patch, 0, False, 1)
        error = next(error for _ in range(3) if (error := on_three.step()) is not None)
    device = r"Device \d \(\S+\) of process 0"
    assert re.fullmatch(
        rf"{device} is at fault: it computed the contribution of replica \d to step 4\d with other bits than {device}, and a third run has "
        rf"those of {device}\. It does not repeat there\. If it comes again on this device, leave the device out \(devices=\)\. The step was "
        rf"finished with the right contribution\. Steps since the last verified one were not looked at\.",
        str(error),
    )


@pytest.mark.parametrize("device", [0, 1])
def test_two_devices_tell_a_fault_that_does_not_repeat(on_two, monkeypatch, device):
    with monkeypatch.context() as patch:
        Fault(patch, device, False, 3)
        error = on_two.step()
    assert str(error).startswith(f"Device {device} (")
    assert on_two.is_sound
    assert on_two.step() is None


def test_two_devices_that_both_repeat_cannot_be_told_apart(on_two, monkeypatch):
    with monkeypatch.context() as patch:
        Fault(patch, 1, True, 3)
        error = on_two.step()
    said = r"Device \d \(\S+\) of process 0 and Device \d \(\S+\) of process 0 compute the contribution of replica \d to step \d+ with other bits, "
    assert re.match(
        said + r"and more runs do not tell which of them is at fault\. The step was not made: the state is that before it\.",
        str(error),
    )
    assert on_two.is_sound


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": 0}, "MirroredStrategy received verify=0; it is the share of steps to verify. Write verify=1/100."),
        ({"verify": "always"}, "MirroredStrategy received verify='always'; it is the share of steps"),
        ({"verify": True}, "MirroredStrategy received verify=True; it is the share of steps"),
        ({"verify": 0.5, "devices": 1, "replicas": 1}, "MirroredStrategy received verify=0.5 with one replica."),
        ({"verify": 0.5, "devices": 1, "replicas": 4}, "MirroredStrategy received verify=0.5 with one device in this process."),
    ],
)
def test_what_cannot_be_verified_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        un.MirroredStrategy(**options)
