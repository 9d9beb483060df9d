"""What a reply's arrays may look like before anything is stored: names, types, shapes and values.

Guarantees: a reply that passes is within the task's bounds; its rollout maps are checked in full, whether weights come
with them or not; where maps travel alone it holds nothing else. `Payload` has already refused NaN and infinities.
Source: docs/security.md, payloads (check 37) and docs/methods.md, what travels.
"""

import re

from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.settings import TaskSettings
from edgefl_protocol import Payload
from edgefl_protocol.errors import MapsError
from edgefl_protocol.rules.maps import check_sent_maps, is_maps, sent_maps_in

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CLAIM = re.compile(r"n_train|n\.(?:0|[1-9][0-9]*)")
_MOST_COUNT = 2**40  # so that counts of all members and rounds together stay below 2**63


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
        if array.dtype.kind in "iu" and array.size and int(array.max()) > _MOST_COUNT:
            raise _bad(f"{name[:40]} holds {array.max()}; a count is at most {_MOST_COUNT}")
    if task.shares_maps and len(payload.scalars) > 1:
        raise _bad(f"the reply has {len(payload.scalars)} scalars, but only site_sha256 is allowed")
    sent = sent_maps_in(task.settings)
    # Where weights travel, too, members send by the method's setting, which older federations keep apart.
    of_members = task.settings.get("maps_per_class", task.maps_per_class)
    most = task.maps_per_class if task.shares_maps or not isinstance(of_members, int) else of_members
    for name, array in payload.arrays.items():
        if not (task.shares_maps or is_maps(name)):
            continue
        try:
            check_sent_maps(name, array, len(task.classes), task.tokens, most, sent)
        except MapsError as error:
            raise _bad(str(error)) from error
    return site_sha256


def _bad(message: str) -> RefusedError:
    return RefusedError("bad_contribution", message)
