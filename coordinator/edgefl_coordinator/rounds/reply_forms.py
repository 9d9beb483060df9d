"""What a reply's arrays may look like before anything is stored: names, types, shapes and values.

Guarantees: a reply that passes holds only what the method shares, within the task's bounds. `Payload` has already
refused NaN and infinities. Source: docs/security.md, payloads (check 37) and docs/methods.md, what travels.
"""

import re

import numpy as np

from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.settings import TaskSettings
from edgefl_protocol import Payload
from edgefl_protocol.rules.maps import class_in_reply, sent_maps_in

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CLAIM = re.compile(r"n_train|n\.(?:0|[1-9][0-9]*)")
_HALF_STEP = 2**-11  # half the spacing of float16 just below 1


def is_claim(name: str) -> bool:
    """Tell whether a scalar says how many images, or images of a class, a reply comes from."""
    return _CLAIM.fullmatch(name) is not None


def check_reply(payload: Payload, task: TaskSettings) -> str:
    """Check a method's reply and return the site's digest in it, or refuse it with `bad_contribution`."""
    site_sha256 = payload.scalars.get("site_sha256")
    if not isinstance(site_sha256, str) or _SHA256.fullmatch(site_sha256) is None:
        raise _bad("the reply lacks the scalar site_sha256 (64 lower-case hexadecimal digits)")
    for name, claimed in payload.scalars.items():
        if is_claim(name) and not (isinstance(claimed, int) and 0 <= claimed <= task.max_samples):
            raise _bad(f"{name} is {str(claimed)[:40]}; it must be a whole number from 0 to {task.max_samples}")
    for name, array in payload.arrays.items():
        if array.dtype.kind == "i" and array.size and array.min() < 0:
            raise _bad(f"{name[:40]} holds {array.min()}; a count is 0 or more")
    if task.shares_maps:
        if len(payload.scalars) > 1:
            raise _bad(f"the reply has {len(payload.scalars)} scalars, but only site_sha256 is allowed")
        for name, array in payload.arrays.items():
            _check_map(name, array, task)
    return site_sha256


def _check_map(name: str, array: np.ndarray, task: TaskSettings) -> None:
    """Check one class's rollout maps: float16 (m, N), m from 1 to M, each map within [0, 1] with maximum 1.

    Where the task asks for their mean it is one map, whose maximum is at least 1/M: where one of the maps is 1.
    """
    label = class_in_reply(name)
    if label is None or label >= len(task.classes):
        raise _bad(f"the array {name[:40]} is not maps.<k> with k below {len(task.classes)}")
    if array.dtype != np.float16 or array.ndim != 2:
        raise _bad(f"{name} is not float16 with two axes (maps, tokens)")
    count, tokens = array.shape
    mean = sent_maps_in(task.settings) == "mean"
    most = 1 if mean else task.maps_per_class
    if not 1 <= count <= most or tokens != task.tokens:
        raise _bad(
            f"{name} has shape ({count}, {tokens}); it must be ({'1' if mean else f'1 to {most}'}, {task.tokens})"
        )
    reached = 1 / task.maps_per_class if mean else 1
    if float(array.min()) < 0 or float(array.max()) > 1 or bool((array.max(axis=1) < reached - _HALF_STEP).any()):
        raise _bad(f"{name} is not normalised by its maximum: every map must lie from 0 to 1 and reach {reached:g}")


def _bad(message: str) -> RefusedError:
    return RefusedError("bad_contribution", message)
