"""Errors of the exchange with a coordinator; each is one sentence with a `code`.

    EdgeflError
    └── ExchangeError
        ├── Unavailable      nothing was decided: try again later (network, deadline, or an answer anybody could forge)
        ├── TlsRefused       the server's certificate, or the pin of the invite, does not fit: nothing was sent
        ├── SignedRefusal  the signed answer is a typed refusal; `code` is the refusal's
        ├── NotEnrolled      the home folder holds no membership, or one that is not approved yet
        └── OutboxError      the outbox is full, damaged or held by another process

`Unavailable` is the only one after which the same work item is sent again (docs/security.md, order of checks: an
unsealed status only ever means "try again later").
"""

from typing import Final

from edgefl_protocol.errors import EdgeflError

# Codes of trust or policy that end a device's command and a site's run with status 3: trying again changes nothing
# (docs/design.md 5).
REFUSED_FOR_GOOD: Final = frozenset(
    {
        "unknown_invite", "expired_invite", "used_invite", "known_key", "bad_proof", "not_approved",
        "fingerprint_differs", "low_order_key", "expired", "other_role",
    }
)  # fmt: skip


class ExchangeError(EdgeflError):
    """Something between this site and its coordinator failed."""

    code = "exchange"


class Unavailable(ExchangeError):
    """Nothing was decided; the same work item may be sent again later."""

    code = "unavailable"

    def __init__(
        self, message: str, code: str | None = None, retry_after_s: float | None = None, *, status: int | None = None
    ) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s  # the wait the server asked for, if any
        self.status = status  # HTTP status of an answer that nobody signed

    @property
    def keys_unknown(self) -> bool:
        """Whether the last answer was that nobody knows these keys: this member may have been shut out."""
        return self.status == 401


def unknown_keys_words(member: str, again: str) -> str:
    """Say that the coordinator does not know a member's keys, and whom to ask; anybody on the way can forge that.

    Args:
        member: what it is, such as `device`.
        again: the command that goes on.
    """
    return (
        f"the coordinator does not know this {member}'s keys any more: ask its operator whether the {member} was shut "
        f"out, or was sent a newer invite; where neither is so, {again} goes on"
    )


class UnknownKeys:
    """Tells when to stop waiting: the coordinator goes on answering that it does not know this member's keys.

    Nobody signed such an answer, so it only ends a wait: nothing is changed, and the same command asks again.
    """

    MOST = 4  # such answers in a row

    def __init__(self, member: str, again: str) -> None:
        """`member` is what it is, such as `device`, and `again` the command that goes on."""
        self._member, self._again, self._heard = member, again, 0

    def heard(self, problem: ExchangeError) -> str:
        """Count an answer; gives the sentence to end with, and "" while it is worth to go on."""
        self._heard = self._heard + 1 if isinstance(problem, Unavailable) and problem.keys_unknown else 0
        return "" if self._heard < self.MOST else unknown_keys_words(self._member, self._again)


class TlsRefused(ExchangeError):
    """The server's certificate or the invite's pin does not fit."""

    code = "tls_refused"


class SignedRefusal(ExchangeError):
    """The coordinator refused, in a signed and sealed answer."""

    code = "refused"

    def __init__(self, message: str, code: str, highest: int | None = None) -> None:
        super().__init__(message, code)
        self.highest = highest  # with code `seq_behind`: the highest sequence number it has seen from this key


class NotEnrolled(ExchangeError):
    """There is no approved membership to act with."""

    code = "not_enrolled"


class OutboxError(ExchangeError):
    """The outbox cannot take or give a work item."""

    code = "outbox"
