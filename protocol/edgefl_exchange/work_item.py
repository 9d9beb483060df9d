"""What waits in the outbox. A large item is read only when its content is asked for (`item_files`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.tensors import tensor_names

LEARNED = "learned"  # kind of the reply that was learned in a round, and belongs to it


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """Something to send, in the clear only in memory."""

    idem: str  # stable key that makes a repeated send count once
    federation: str  # whom it is for
    kind: str  # `reply` for a contribution, which any round may take; `LEARNED` for the reply of one round
    round: int | None  # the round it has been promised to; None until a contribution is first sent
    created_ms: int  # when it was put, Unix milliseconds
    attempts: int  # how often it was sent without a signed answer
    size: int  # bytes of its payload
    blob: BlobReference | None = None  # what names its file, where the payload lies in one
    content: Callable[[], bytes] = field(repr=False, compare=False)  # reads the payload
    # gives its beginning without the rest; None: by `content`
    chunks: Callable[[], Iterable[bytes]] | None = field(default=None, repr=False, compare=False)

    @property
    def names(self) -> list[str]:
        """Names of its arrays; of a large item only the beginning is read.

        Raises:
            OutboxError: the item is damaged.
        """
        return tensor_names([self.content()] if self.chunks is None else self.chunks())

    @property
    def payload(self) -> bytes:
        """Bytes of its payload; of a large item they are read and decrypted each time this is asked."""
        return self.content()


@dataclass(frozen=True)
class WorkItemKey:
    """What an item is filed under; see `WorkItem`."""

    idem: str
    federation: str
    kind: str
    round: int | None
