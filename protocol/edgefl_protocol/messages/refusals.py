"""The typed error inside a sealed reply.

Guarantees: a `Refusal` read from a payload has the stated form. The scalars are `error` (a code), `message` (one
sentence for a person) and, with code `seq_behind`, `highest`. The reply header's `sts` is the HTTP status of the code.
Source: docs/security.md, order of checks: after the signature, errors are sealed and typed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from edgefl_protocol.fields import CODE, expect_names, sentence, text, whole
from edgefl_protocol.payload import Payload, Scalar
from edgefl_protocol.strict_json import MAX_INT

REFUSAL_STATUS: Mapping[str, int] = MappingProxyType(
    {
        "bad_message": 400,  # the payload does not fit the route
        "unknown_invite": 403,  # wrong token, other federation or other role; says no more on purpose
        "expired_invite": 403,
        "used_invite": 403,
        "known_key": 409,  # a member or an enrolment with this key exists
        "replaced_key": 409,  # the member has changed this key for another one
        "bad_proof": 403,  # the nonce is not the one that was sealed to the new key
        "pending": 403,  # the operator has not approved yet
        "not_approved": 403,  # the enrolment has not proved its keys, or the role may not call the route
        "no_round": 409,  # the named round has not been opened
        "round_closed": 409,  # too late: the round is aggregated or past its deadline
        "already_replied": 409,  # another work item of this site was accepted in this round
        "idem_conflict": 409,  # same idem, other payload
        "no_blob": 409,  # the reply's blob is not here as a whole: send what is missing, then the reply again
        "bad_blob": 422,  # the blob is not what its reference says; it was dropped
        "replayed": 409,
        "seq_behind": 409,  # with `highest`
        "seq_jump": 409,  # more than 2^32 ahead
        "small_cohort": 403,  # fewer other contributors than the policy allows
        "bad_contribution": 422,  # wrong names, shapes, dtypes or values for the method
        "too_large": 413,
        "unsupported": 422,
        "not_found": 404,  # no such bundle, index or broadcast
        "busy": 503,
        "storage_full": 507,
        "internal": 500,
    }
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A typed error inside a sealed reply."""

    code: str  # a key of `REFUSAL_STATUS`; an unknown code is kept, so a newer coordinator is understood
    message: str  # one sentence for a person
    # with code `seq_behind`, the highest sequence number the coordinator has seen from this key
    highest: int | None = None

    @property
    def status(self) -> int:
        """The HTTP status that goes with the code."""
        return REFUSAL_STATUS.get(self.code, 400)

    def to_payload(self) -> Payload:
        """Return the payload that carries this refusal."""
        scalars: dict[str, Scalar] = {"error": self.code, "message": self.message}
        if self.highest is not None:
            scalars["highest"] = self.highest
        return Payload({}, scalars)

    @classmethod
    def from_payload(cls, payload: Payload) -> "Refusal | None":
        """Return the refusal a reply carries, or None where it carries an answer.

        Raises:
            PayloadError: the reply names an error but has not the form of a refusal.
        """
        if "error" not in payload.scalars:
            return None
        behind = frozenset({"highest"}) & frozenset(payload.scalars)
        expect_names(payload, "refusal", frozenset({"error", "message"}) | behind)
        highest = whole(payload.scalars["highest"], "highest", 0, MAX_INT) if behind else None
        return cls(
            code=text(payload.scalars["error"], "error", CODE),
            message=sentence(payload.scalars["message"], "message", 500),
            highest=highest,
        )
