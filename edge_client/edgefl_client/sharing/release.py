"""How a contribution leaves: what it would tell its receiver, what the owner's policy says to that, and the outbox.

What a payload would tell is read from its own bytes, so it is what is sealed and not what was meant to be. Only
numbers, names and digests are given; a value itself appears in the extremes alone. A dry run describes the very bytes
that a real one would keep. Source: docs/security.md, exchange policy; docs/decisions/0031.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.policy import Policy, PolicyError, Spent, load_policy
from edgefl_client.sharing.spending import sent_before
from edgefl_exchange.identity import Identity
from edgefl_exchange.membership import load_membership
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules.travels import travels_of


@dataclass(frozen=True, kw_only=True)
class Release:
    """A contribution on its way out. A day's limits are not judged here but when it is sent."""

    device: Device  # this device
    policy: Policy  # the owner's decisions as they were when it began
    spent: Spent  # the moment; nothing of a day is counted
    dry_run: bool  # only say what would leave

    @classmethod
    def begin(cls, device: Device, kind: str, *, dry_run: bool) -> "Release":
        """Ask the owner's policy before the work."""
        found = cls(
            device=device, policy=load_policy(device.home), spent=Spent(now_ms=device.clock_ms()), dry_run=dry_run
        )
        if not dry_run:
            found.policy.check((kind,), 0, found.spent)
        return found

    def judge(self, described: dict[str, Any]) -> dict[str, Any]:
        """Ask the owner's policy about what was made; gives what `--json` prints of the answer.

        Raises:
            PolicyError: it may not leave, and this is no dry run.
        """
        try:
            self.policy.check(described["travels"], described["bytes"], self.spent)
        except PolicyError as refusal:
            if not self.dry_run:
                raise
            return {"allowed": False, "code": refusal.code, "message": str(refusal)}
        return {"allowed": True, "code": None, "message": None}

    def sent_before(self, content: bytes) -> int | None:
        """Find the round that this very contribution was sent for lately; None where it was not, or in a dry run."""
        if self.dry_run:
            return None
        home = self.device.home
        return sent_before(home, load_membership(home.member).federation, content)

    def keep(self, content: bytes) -> str | None:
        """Keep the contribution in the outbox, in place of one that was never sent; gives its key.

        None in a dry run, which keeps nothing.
        """
        if self.dry_run:
            return None
        device = self.device
        federation = load_membership(device.home.member).federation
        with (
            Identity(device.home.member, device.passphrase) as identity,
            device.outbox(identity) as outbox,
        ):
            return outbox.put(federation, "reply", content, device.clock_ms())


def describe(content: bytes) -> dict[str, Any]:
    """Say what a payload would tell its receiver: kinds, each array's form and extremes, scalars, length, digest."""
    payload = Payload.from_bytes(content, len(content))
    return {
        "travels": list(travels_of(payload.arrays)),
        "arrays": {
            name: {
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "min": array.min().item() if array.size else None,
                "max": array.max().item() if array.size else None,
                "bytes": array.nbytes,
            }
            for name, array in payload.arrays.items()
        },
        "scalars": dict(payload.scalars),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def described_text(found: dict[str, Any]) -> str:
    """Write a description for a person: a line per array and scalar, then length and digest."""
    lines = [
        f"{name}: {one['dtype']} {'x'.join(map(str, one['shape'])) or 'scalar'}, "
        + ("empty" if one["min"] is None else f"{one['min']:.6g} to {one['max']:.6g}")
        + f", {one['bytes']} bytes"
        for name, one in found["arrays"].items()
    ]
    lines += [f"{name}: {value}" for name, value in found["scalars"].items()]
    return "\n".join([*lines, f"in all {found['bytes']} bytes, SHA-256 {found['sha256']}"])
