"""Every error that this project raises on purpose.

Each one carries one sentence (what was found, what was allowed, what to do) and a `code` in snake_case that programs
compare. Anything else that escapes from a public function is a defect.

    EdgeflError
    ├── PayloadError            a payload or tensor file breaks its format or bounds
    │   └── MapsError           rollout maps of another class, grid or name than the reader's
    ├── KeyMaterialError        a key, key file or passphrase is unusable
    ├── BlobError               a blob was cut, changed, or is not the one its reference names
    ├── EnvelopeError           an envelope was refused; the subclass is the step that refused it (docs/security.md 2.3)
    │   ├── FrameError          size, magic, suite byte, lengths
    │   ├── HeaderError         header is not the strict JSON record
    │   ├── RecipientError      sealed for another key, or under another suite
    │   ├── RouteError          made for another method, path, federation, type or content; or another request's reply
    │   ├── ClockError          too old, too early, expired, or valid for too long
    │   ├── SenderError         unknown, revoked or not allowed here
    │   ├── OpenError           does not decrypt, or the length inside differs from the header's
    │   ├── SignatureError      the sender did not sign this
    │   ├── ReplayError         seen before (code `replayed`)
    │   └── SequenceError       sequence number below the window (`seq_behind`) or too far ahead (`seq_jump`)
    ├── InviteError             an invite string is damaged, expired or of another format
    ├── RecordError             a signed record (time, index, key record) is damaged, unsigned, expired or rolled back
    ├── BundleError             a model bundle was refused; `code` names the check
    ├── ImageError              a picture cannot be used; `code` says why
    ├── QuestionError           a question about a picture cannot be used; `code` says why
    └── StorageError            a file cannot be read or written (disk full, permissions, size)

`Raises:` of a function lists what its first sentence does not tell. It does not list what holds everywhere. Whoever
touches a file may raise `StorageError`: the file is missing, damaged, unreadable or open to others, or the disk is
full; what was kept before then still counts. Whoever opens kept keys may raise `KeyMaterialError`. Whoever loads or
runs a bundle's graph may raise `BundleError` (`graph_load`, `graph_run`, `runtime_too_old`). A call that fails on a
member, a file or a picture passes on that error.

Up to and including `SignatureError` the sender is not authenticated: a service answers all of those alike.
"""

from typing import Final

# Codes of errors that end a command of trainer, export or coordinator with status 2: what was asked for cannot be had,
# and nothing was begun (docs/design.md 5).
USAGE_CODES: Final = frozenset({"usage", "setting", "run", "backbone"})


class EdgeflError(Exception):
    """Base of all our errors."""

    code: str = "error"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class PayloadError(EdgeflError):
    """A payload or tensor file breaks its format or bounds."""

    code = "bad_payload"


class MapsError(PayloadError):
    """Rollout maps of a reply or a broadcast cannot be used; `code` says why."""

    code = "other_maps"


class KeyMaterialError(EdgeflError):
    """A key, key file or passphrase is unusable."""

    code = "bad_key"


class BlobError(EdgeflError):
    """A blob was cut, changed, or is not the one that its reference names; nothing of it may be used."""

    code = "bad_blob"


class EnvelopeError(EdgeflError):
    """An envelope was refused."""

    code = "bad_envelope"


class FrameError(EnvelopeError):
    """The frame (size, magic, suite byte, lengths) is wrong."""

    code = "bad_frame"


class HeaderError(EnvelopeError):
    """The header is not the strict JSON record."""

    code = "bad_header"


class RecipientError(EnvelopeError):
    """The envelope is sealed for another key or suite."""

    code = "wrong_recipient"


class RouteError(EnvelopeError):
    """The envelope was made for another route, federation, type or request."""

    code = "wrong_route"


class ClockError(EnvelopeError):
    """The envelope is outside its time."""

    code = "wrong_time"


class SenderError(EnvelopeError):
    """The sender is unknown, revoked or not allowed here."""

    code = "unknown_sender"


class OpenError(EnvelopeError):
    """The sealed part does not decrypt or has another length than stated."""

    code = "cannot_open"


class SignatureError(EnvelopeError):
    """The sender did not sign this envelope."""

    code = "bad_signature"


class ReplayError(EnvelopeError):
    """The same envelope, sequence number or message id was accepted before."""

    code = "replayed"


class SequenceError(EnvelopeError):
    """The sequence number lies outside what the window can judge."""

    code = "seq_behind"

    def __init__(self, message: str, code: str | None = None, highest: int = 0) -> None:
        super().__init__(message, code)
        self.highest = highest  # accepted so far from this sender; one that lags continues above it


class InviteError(EdgeflError):
    """An invite string is damaged, expired or of another format."""

    code = "bad_invite"


class RecordError(EdgeflError):
    """A signed record is damaged, not signed by the expected key, expired or rolled back."""

    code = "bad_record"


class BundleError(EdgeflError):
    """A model bundle was refused; `code` names the check."""

    code = "bad_bundle"


class ImageError(EdgeflError):
    """A picture cannot be used; `code` says why."""

    code = "unreadable"


class QuestionError(EdgeflError):
    """A question about a picture cannot be used; `code` says why."""

    code = "bad_question"


class StorageError(EdgeflError):
    """A file cannot be read or written."""

    code = "storage"
