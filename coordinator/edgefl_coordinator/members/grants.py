"""How many images a member's replies may weigh, as the operator approved it.

Guarantees: a grant belongs to one member for good, whichever keys it uses, and goes with it when it is shut out. Who
has none is bounded by what the others claim (`rounds.protection.bounding`). Source: docs/security.md 4.
"""

from sqlalchemy import Connection, select

from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.statements import KEEP_FACT
from edgefl_coordinator.store.tables import facts

_GRANTED = "images_"  # the facts that hold the images of a member, by its first key id


def grant(connection: Connection, now_ms: int, member: MemberRow, images: int) -> None:
    """Let a member's replies weigh up to so many images; a later grant replaces this one."""
    KEEP_FACT.run(connection, key=_GRANTED + member.skid, value=str(images))
    audit.append(connection, now_ms, "granted", member.name, {"images": images})


def granted(connection: Connection) -> dict[str, int]:
    """Return name → granted images of the approved members that have a grant."""
    found = connection.execute(select(facts).where(facts.c.key.startswith(_GRANTED, autoescape=True)))
    images = {row.key.removeprefix(_GRANTED): int(row.value) for row in found}
    return {one.name: images[one.skid] for one in membership.approved(connection) if one.skid in images}
