"""What every contribution shares on its way out: the owner's policy is asked, and the bytes enter the outbox.

Source: docs/security.md, exchange policy; docs/decisions/0031.
"""

from collections.abc import Mapping
from typing import Any

from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.policy import Policy, PolicyError, Spent
from edgefl_exchange.identity import Identity
from edgefl_exchange.membership import load_membership


def refused(policy: Policy, described: Mapping[str, Any], spent: Spent) -> PolicyError | None:
    """Why the policy refuses what was described; None where it may leave.

    Args:
        policy: the owner's decisions.
        described: what `outgoing.describe` told of the payload.
        spent: what left before.
    """
    try:
        policy.check(described["travels"], described["bytes"], spent)
    except PolicyError as error:
        return error
    return None


def policy_told(refusal: PolicyError | None) -> dict[str, Any]:
    """What `--json` prints of the policy's answer."""
    return {
        "allowed": refusal is None,
        "code": None if refusal is None else refusal.code,
        "message": None if refusal is None else str(refusal),
    }


def keep(device: Device, content: bytes) -> str:
    """Keep a contribution in the outbox, in place of one that was never sent; gives its key.

    Raises:
        EdgeflError: the membership, the keys or the disk.
    """
    federation = load_membership(device.home.member).federation
    with (
        Identity(device.home.member, device.passphrase) as identity,
        device.outbox(identity) as outbox,
    ):
        return outbox.put(federation, "reply", content, device.clock_ms())
