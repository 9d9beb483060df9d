"""What each event of the audit log means, in words: for `edgefl-coordinator log`, and for the lines of `serve`.

Guarantees: the words of an event are made of names, numbers and codes alone. What a member may have written into an
explanation (the name of an array, say) is told apart from them, so that no line of a log file holds it. Source:
docs/security.md 2.6, check 14.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

# {who} is the subject; the other names are those of the row's detail.
_WORDS: Final[Mapping[str, str]] = {
    "approved": "{who} was approved",
    "backup": "a backup of {who} was made",
    "blob_begun": "{who} began to send {bytes} bytes in pieces",
    "blob_pushed_out": "{who}: an unfinished upload of {bytes} bytes was deleted to make room",
    "broadcast_released": "{who} fetched the broadcast of round {round}",
    "broadcasts_made": "broadcasts of round {who} were made for newcomers: {members}",
    "bundle_fetched": "{member} fetched the bundle {who} version {version}",
    "end_released": "{who} fetched the last broadcast, made after the last round",
    "enrol_refused": "{who} was refused at enrolment: {code}",
    "enrolled": "{who} enrolled as {role}",
    "enrolment_superseded": "{who}: a new invite replaces the enrolment that was not approved",
    "fingerprint_mismatch": "{who} was not approved: the typed fingerprint is not the one of its keys",
    "gate_accepted": "the gate accepted what round {who} made",
    "gate_refused": "the gate refused round {who}: the state before it stays",
    "granted": "replies of {who} may weigh up to {images} images",
    "invite": "{who} was invited as {role}",
    "invite_withdrawn": "the invite for {who} was withdrawn",
    "job_failed": "round {who}: the coordinator could not do its job ({kind})",
    "judged_again": "round {who}: refused replies are judged again: {replies}",
    "key_revoked": "the key {key_id} of {who} was revoked",
    "keys_rotated": "{who} changed its keys",
    "over": "the federation {who} is over: its last round, {rounds}, is done",
    "proved": "{who} proved its keys and waits for approval",
    "published": "the bundle {who} version {version} was published",
    "refused": "{who} was refused on {route}: {code}",
    "reply_accepted": "{who} replied in round {round}, {bytes} bytes",
    "reply_bounded": "the reply of {who} in round {round} counted for less than it said",
    "reply_corrected": "{who} replaces its refused reply of round {round}",
    "reply_noticed": "the reply of {who} in round {round} holds maps or features that are odd",
    "reply_refused": "the reply of {who} in round {round} was refused",
    "restored": "{who} was restored from its backup of {backup}",
    "revoked": "{who} was shut out",
    "root_published": "root set {version} was published",
    "round_closed": "round {who} closed ({reason}), replies: {replies}",
    "round_extended": "round {who} is extended until {deadline} because it has too few replies: {replies}",
    "round_opened": "round {who} opened ({phase}), until {deadline}",
    "round_reopened": "round {who} accepts replies again until {deadline} and keeps the usable ones: {replies}",
    "sealing_key": "sealing key {number} is in use",
    "serve": "the server started",
    "setting": "the setting {who} is now {value}",
    "signing_key": "the signing key {key_id} is in use",
    "start": "the operator started the rounds",
    "state": "the server's state after round {who} was stored",
    "stop": "the server stopped",
}
_EXPLAINED: Final[Mapping[str, str]] = {
    "gate_accepted": "said",
    "gate_refused": "said",
    "job_failed": "error",
    "reply_bounded": "how",
    "reply_noticed": "how",
    "reply_refused": "reason",
    "round_reopened": "problem",
}
_WARNINGS: Final = frozenset(
    {"enrol_refused", "fingerprint_mismatch", "gate_refused", "refused", "reply_bounded", "reply_noticed"}
    | {"reply_refused", "round_reopened"}
)
_DETAILS: Final = frozenset({"blob_begun", "broadcast_released", "bundle_fetched", "end_released", "stop"})


def event_words(event: str, subject: str, detail: Mapping[str, Any]) -> str:
    """Say what happened; an event of another version by its name."""
    deadline_ms = detail.get("deadline_ms")
    deadline = "" if deadline_ms is None else datetime.fromtimestamp(deadline_ms / 1000, UTC).strftime("%H:%M:%S UTC")
    try:
        return _WORDS[event].format(who=subject, deadline=deadline, **_as_typed(detail))
    except (KeyError, IndexError):
        return f"{subject}: {event}"


def _as_typed(detail: Mapping[str, Any]) -> dict[str, Any]:
    """Write truth values as `set` takes and shows them."""
    return {key: str(value).lower() if isinstance(value, bool) else value for key, value in detail.items()}


def explanation(event: str, detail: Mapping[str, Any]) -> str:
    """Return the explanation that a row holds beside its words, or ""."""
    return str(detail.get(_EXPLAINED.get(event, ""), ""))


def without_explanation(event: str, detail: Mapping[str, Any]) -> dict[str, Any]:
    """Return the detail without its explanation."""
    return {key: value for key, value in detail.items() if key != _EXPLAINED.get(event)}


def event_level(event: str, detail: Mapping[str, Any]) -> int:
    """Return the level at which `serve` logs an event; who waits for approval asks again and again."""
    if detail.get("code") == "pending":
        return logging.DEBUG
    if event == "job_failed":
        return logging.ERROR
    return logging.WARNING if event in _WARNINGS else logging.DEBUG if event in _DETAILS else logging.INFO
