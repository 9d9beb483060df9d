"""Tables of the store, in SQLite as in PostgreSQL.

Guarantees: this module alone says what the tables are; `sqlite_file` and `postgresql_database` make them. Secrets do
not enter: of an invite only the token's SHA-256, of a reply only the name of its blob; the name is NULL once the blob
is no longer needed. Times are Unix milliseconds. Whole numbers have 64 bits and texts are ordered by their code points
in both. What is asked with each message, or at each look at the rounds, has an index. Source: docs/security.md,
reliability.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    text,
)
from sqlalchemy import Integer as PlainInteger
from sqlalchemy import Text as PlainText

VERSION = 2  # of the tables
Integer = PlainInteger().with_variant(BigInteger, "postgresql")
Text = PlainText().with_variant(PlainText(collation="C"), "postgresql")
metadata = MetaData()


def _table(name: str, *parts: Any, **options: Any) -> Table:
    return Table(name, metadata, *parts, sqlite_strict=True, **options)


def _column(name: str, kind: Any, *constraints: Any, **options: Any) -> "Column[Any]":
    """Return a column that is never NULL."""
    return Column(name, kind, *constraints, nullable=False, autoincrement=False, **options)


def _member(**options: Any) -> "Column[Any]":
    return _column("skid", Text, ForeignKey("members.skid"), **options)


members = _table(
    "members",
    _column("skid", Text, primary_key=True),  # key id of the signing key
    _column("name", Text),
    _column("role", Text, CheckConstraint("role IN ('site', 'device')")),
    _column("state", Text, CheckConstraint("state IN ('unproved', 'pending', 'approved', 'revoked')")),
    _column("signing_public", LargeBinary),
    _column("sealing_suite", Integer),
    _column("sealing_public", LargeBinary, unique=True),
    _column("enrolled_ms", Integer),
    Column("approved_ms", Integer),
    Column("revoked_ms", Integer),
)
_LIVING = text("state <> 'revoked'")
Index("members_name", members.c.name, unique=True, sqlite_where=_LIVING, postgresql_where=_LIVING)
Index("members_state", members.c.state, members.c.name)

member_keys = _table(  # signing keys of a member after its first change of keys; before, there are none here
    "member_keys",
    _column("skid", Text, primary_key=True),
    _column("member", Text, ForeignKey("members.skid")),  # its first key id, which names it for good
    _column("signing_public", LargeBinary),
    _column("added_ms", Integer),
    Column("until_ms", Integer),  # NULL: the current key
    Column("record", LargeBinary),  # signed by the key before and by this one; NULL for the first
)

invites = _table(
    "invites",
    _column("token_sha256", Text, primary_key=True),
    _column("name", Text),
    _column("role", Text),
    _column("created_ms", Integer),
    _column("expires_ms", Integer),
    Column("used_by", Text, ForeignKey("members.skid"), unique=True),
)

windows = _table(  # of accepted message numbers
    "windows",
    _column("skid", Text, primary_key=True),
    _column("highest", Integer),
    _column("bitmap", LargeBinary),
)

mids = _table(  # ids of accepted messages
    "mids",
    _column("skid", Text, primary_key=True),
    _column("mid", Text, primary_key=True),
    _column("until_ms", Integer),
    sqlite_with_rowid=False,
)
Index("mids_until", mids.c.until_ms)

idempotency = _table(
    "idempotency",
    _member(primary_key=True),
    _column("idem", Text, primary_key=True),
    _column("payload_sha256", Text),
    _column("answer", LargeBinary),  # payload bytes of the first answer
    _column("created_ms", Integer),
)

rounds = _table(
    "rounds",
    _column("number", Integer, primary_key=True),
    _column("phase", Text),
    _column("state", Text, CheckConstraint("state IN ('open', 'aggregating', 'done')")),
    _column("opened_ms", Integer),
    _column("deadline_ms", Integer),
    Column("closed_ms", Integer),
    Column("close_reason", Text),
    _column("tried", Integer, default=0),  # replies left from an aggregation that failed
    Column("problem", Text),  # why it failed
)

replies = _table(
    "replies",
    _column("number", Integer, ForeignKey("rounds.number"), primary_key=True),
    _member(primary_key=True),
    _column("idem", Text),
    Column("blob", Text, unique=True),
    _column("sha256", Text),
    _column("bytes", Integer),
    _column("arrays", Integer),
    _column("site_sha256", Text),
    _column("accepted_ms", Integer),
    _column("beside", Integer),  # 1: a contribution beside the average, which counts for no quorum and no cohort
)
Index("replies_skid", replies.c.skid, replies.c.number)

refused_replies = _table(
    "refused_replies",
    _column("number", Integer, ForeignKey("rounds.number"), primary_key=True),
    _member(primary_key=True),
    _column("reason", Text),
    _column("refused_ms", Integer),
)

broadcasts = _table(
    "broadcasts",
    _column("number", Integer, primary_key=True),
    _member(primary_key=True),
    Column("blob", Text, unique=True),
    _column("sha256", Text),
    _column("others", Integer),  # sites other than the receiver whose contributions it holds
)

states = _table(
    "states",
    _column("number", Integer, primary_key=True),  # the server after this round; 0 is the start
    Column("blob", Text, unique=True),
    _column("sha256", Text),
)

uploads = _table(  # blobs that members are sending; one that was used is gone from here
    "uploads",
    _member(primary_key=True),
    _column("id", Text, primary_key=True),
    _column("size", Integer),
    _column("sha256", Text),
    _column("have", Integer, CheckConstraint("have BETWEEN 0 AND size")),  # bytes from the beginning that lie durably
    _column("blob", Text, unique=True),  # the file
    _column("touched_ms", Integer),
)
Index("uploads_touched", uploads.c.touched_ms)

small_blobs = _table(  # blobs that lie here and in no file of their own: one commit makes many of them durable
    "small_blobs", _column("name", Text, primary_key=True), _column("data", LargeBinary)
)

offers = _table(  # large stored payloads, as sealed for one member
    "offers",
    _column("id", Text, primary_key=True),
    _member(),
    _column("blob", Text),  # the file of the payload; the sealed form is made when it is asked for
    _column("bytes", Integer),  # of the payload
    _column("sha256", Text),  # of the sealed form
    UniqueConstraint("skid", "blob"),
)

bundles = _table(
    "bundles",
    _column("line", Text, primary_key=True),
    _column("task", Text, primary_key=True),
    _column("version", Integer, primary_key=True),
    _column("bundle_id", Text),
    _column("sha256", Text),
    _column("bytes", Integer),
    _column("blob", Text, unique=True),
    _column("published_ms", Integer),
    _column("signers", Text),  # JSON list of the key ids that claim to have signed it
)

revocations = _table(
    "revocations",
    _column("key_id", Text, primary_key=True),
    _column("kind", Text, CheckConstraint("kind IN ('member', 'signer')")),
    _column("name", Text),
    _column("revoked_ms", Integer),
)

roots = _table(
    "roots",
    _column("version", Integer, primary_key=True),
    _column("record", LargeBinary),
    _column("published_ms", Integer),
)

facts = _table("facts", _column("key", Text, primary_key=True), _column("value", Text))

audit = _table(
    "audit",
    _column("number", Integer, primary_key=True),
    _column("at_ms", Integer),
    _column("event", Text),
    _column("subject", Text),
    _column("detail", Text),  # JSON
    _column("sha256", Text),  # chained over the previous row
)
Index("audit_event", audit.c.event, audit.c.number)

LATER = (small_blobs,)  # tables that a store of version 1 lacks
