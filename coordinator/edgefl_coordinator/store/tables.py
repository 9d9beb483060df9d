"""Tables of the store, and the append-only list of migrations that makes them.

Guarantees: a migration runs once, in one transaction, and is recorded by name; a released migration is never edited.
Secrets do not enter: of an invite only the token's SHA-256, of a reply only the name of its blob; the name is NULL once
the blob is no longer needed. Times are Unix milliseconds. Source: docs/security.md, reliability.
"""

from collections.abc import Callable

from sqlalchemy import Column, Connection, Integer, LargeBinary, MetaData, Table, Text, text

metadata = MetaData()

migrations = Table("migrations", metadata, Column("name", Text, primary_key=True), Column("applied_ms", Integer))

members = Table(
    "members",
    metadata,
    Column("skid", Text, primary_key=True),  # key id of the signing key
    Column("name", Text),
    Column("role", Text),
    Column("state", Text),  # unproved, pending, approved, revoked
    Column("signing_public", LargeBinary),
    Column("sealing_suite", Integer),
    Column("sealing_public", LargeBinary),
    Column("enrolled_ms", Integer),
    Column("approved_ms", Integer),
    Column("revoked_ms", Integer),
)

invites = Table(
    "invites",
    metadata,
    Column("token_sha256", Text, primary_key=True),
    Column("name", Text),
    Column("role", Text),
    Column("created_ms", Integer),
    Column("expires_ms", Integer),
    Column("used_by", Text),  # skid
)

windows = Table(
    "windows",
    metadata,
    Column("skid", Text, primary_key=True),
    Column("highest", Integer),
    Column("bitmap", LargeBinary),
)

mids = Table(
    "mids",
    metadata,
    Column("skid", Text, primary_key=True),
    Column("mid", Text, primary_key=True),
    Column("until_ms", Integer),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("skid", Text, primary_key=True),
    Column("idem", Text, primary_key=True),
    Column("payload_sha256", Text),
    Column("answer", LargeBinary),  # payload bytes of the first answer
    Column("created_ms", Integer),
)

rounds = Table(
    "rounds",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("phase", Text),
    Column("state", Text),  # open, aggregating, done
    Column("opened_ms", Integer),
    Column("deadline_ms", Integer),
    Column("closed_ms", Integer),
    Column("close_reason", Text),
    Column("tried", Integer),  # replies left from an aggregation that failed
    Column("problem", Text),  # why it failed
)

replies = Table(
    "replies",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("skid", Text, primary_key=True),
    Column("idem", Text),
    Column("blob", Text),
    Column("sha256", Text),
    Column("bytes", Integer),
    Column("arrays", Integer),
    Column("site_sha256", Text),
    Column("accepted_ms", Integer),
    Column("beside", Integer),  # 1: a contribution beside the average, which counts for no quorum and no cohort
)

refused_replies = Table(
    "refused_replies",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("skid", Text, primary_key=True),
    Column("reason", Text),
    Column("refused_ms", Integer),
)

broadcasts = Table(
    "broadcasts",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("skid", Text, primary_key=True),
    Column("blob", Text),
    Column("sha256", Text),
    Column("others", Integer),  # sites other than the receiver whose contributions it holds
)

states = Table(
    "states",
    metadata,
    Column("number", Integer, primary_key=True),  # the server after this round; 0 is the start
    Column("blob", Text),
    Column("sha256", Text),
)

uploads = Table(  # blobs that members are sending; one that was used is gone from here
    "uploads",
    metadata,
    Column("skid", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("size", Integer),
    Column("sha256", Text),
    Column("have", Integer),  # bytes from the beginning on that lie durably
    Column("blob", Text),  # the file
    Column("touched_ms", Integer),
)

offers = Table(  # stored payloads above one envelope's cap, as sealed for one member
    "offers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("skid", Text),
    Column("blob", Text),  # the file of the payload; the sealed form is made when it is asked for
    Column("bytes", Integer),  # of the payload
    Column("sha256", Text),  # of the sealed form
)

facts = Table("facts", metadata, Column("key", Text, primary_key=True), Column("value", Text))

bundles = Table(
    "bundles",
    metadata,
    Column("line", Text, primary_key=True),
    Column("task", Text, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("bundle_id", Text),
    Column("sha256", Text),
    Column("bytes", Integer),
    Column("blob", Text),
    Column("published_ms", Integer),
    Column("signers", Text),  # JSON list of the key ids that claim to have signed it
)

member_keys = Table(
    "member_keys",  # signing keys of a member after its first change of keys; before, there are none here
    metadata,
    Column("skid", Text, primary_key=True),
    Column("member", Text),  # members.skid: the member's first key id, which names it for good
    Column("signing_public", LargeBinary),
    Column("added_ms", Integer),
    Column("until_ms", Integer),  # NULL: the current key
    Column("record", LargeBinary),  # signed by the key before and by this one; NULL for the first
)

revocations = Table(
    "revocations",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("kind", Text),  # member, signer
    Column("name", Text),
    Column("revoked_ms", Integer),
)

roots = Table(
    "roots",
    metadata,
    Column("version", Integer, primary_key=True),
    Column("record", LargeBinary),
    Column("published_ms", Integer),
)

audit = Table(
    "audit",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("at_ms", Integer),
    Column("event", Text),
    Column("subject", Text),
    Column("detail", Text),  # JSON
    Column("sha256", Text),  # chained over the previous row
)


def m001_first_tables(connection: Connection) -> None:
    """Make the tables of the first release."""
    for statement in _M001.strip().split(";"):
        if statement.strip():
            connection.execute(text(statement))


def m002_others_in_a_broadcast(connection: Connection) -> None:
    """Keep with a broadcast how many others it holds; those made before are made again, as nobody counted them."""
    connection.execute(text("DELETE FROM broadcasts"))
    connection.execute(text("ALTER TABLE broadcasts ADD COLUMN others INTEGER NOT NULL DEFAULT 0"))


def m003_replies_that_do_not_count(connection: Connection) -> None:
    """Keep which replies were refused at aggregation, and why a round opened again."""
    connection.execute(text("ALTER TABLE rounds ADD COLUMN tried INTEGER NOT NULL DEFAULT 0"))
    connection.execute(text("ALTER TABLE rounds ADD COLUMN problem TEXT"))
    connection.execute(
        text(
            "CREATE TABLE refused_replies (number INTEGER NOT NULL REFERENCES rounds (number), "
            "skid TEXT NOT NULL REFERENCES members (skid), reason TEXT NOT NULL, refused_ms INTEGER NOT NULL, "
            "PRIMARY KEY (number, skid)) STRICT"
        )
    )


def m004_past_blobs_go(connection: Connection) -> None:
    """Let a row outlive its blob: what a past round held is deleted, who sent what and when stays."""
    for statement in _M004.strip().split(";"):
        if statement.strip():
            connection.execute(text(statement))


def m006_keys_over_time(connection: Connection) -> None:
    """Keep a member's keys of before, revoked keys and root sets; members shut out before stand in the new list."""
    for statement in _M006.strip().split(";"):
        if statement.strip():
            connection.execute(text(statement))


def m005_blobs_in_pieces(connection: Connection) -> None:
    """Keep what members are sending in pieces, and what lies ready for them to fetch so."""
    for statement in _M005.strip().split(";"):
        if statement.strip():
            connection.execute(text(statement))


def m007_contributions_beside_the_average(connection: Connection) -> None:
    """Mark the replies that join what others are dealt, and not the average."""
    connection.execute(text("ALTER TABLE replies ADD COLUMN beside INTEGER NOT NULL DEFAULT 0"))


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    m001_first_tables,
    m002_others_in_a_broadcast,
    m003_replies_that_do_not_count,
    m004_past_blobs_go,
    m005_blobs_in_pieces,
    m006_keys_over_time,
    m007_contributions_beside_the_average,
)

_M001 = """
CREATE TABLE members (
    skid TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL CHECK (role IN ('site', 'device')),
    state TEXT NOT NULL CHECK (state IN ('unproved', 'pending', 'approved', 'revoked')),
    signing_public BLOB NOT NULL, sealing_suite INTEGER NOT NULL, sealing_public BLOB NOT NULL UNIQUE,
    enrolled_ms INTEGER NOT NULL, approved_ms INTEGER, revoked_ms INTEGER
) STRICT;
CREATE UNIQUE INDEX members_name ON members (name) WHERE state <> 'revoked';
CREATE TABLE invites (
    token_sha256 TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, created_ms INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL, used_by TEXT UNIQUE REFERENCES members (skid)
) STRICT;
CREATE TABLE windows (skid TEXT PRIMARY KEY, highest INTEGER NOT NULL, bitmap BLOB NOT NULL) STRICT;
CREATE TABLE mids (
    skid TEXT NOT NULL, mid TEXT NOT NULL, until_ms INTEGER NOT NULL, PRIMARY KEY (skid, mid)
) STRICT, WITHOUT ROWID;
CREATE INDEX mids_until ON mids (until_ms);
CREATE TABLE idempotency (
    skid TEXT NOT NULL REFERENCES members (skid), idem TEXT NOT NULL, payload_sha256 TEXT NOT NULL,
    answer BLOB NOT NULL, created_ms INTEGER NOT NULL, PRIMARY KEY (skid, idem)
) STRICT;
CREATE TABLE rounds (
    number INTEGER PRIMARY KEY, phase TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'aggregating', 'done')),
    opened_ms INTEGER NOT NULL, deadline_ms INTEGER NOT NULL, closed_ms INTEGER, close_reason TEXT
) STRICT;
CREATE TABLE replies (
    number INTEGER NOT NULL REFERENCES rounds (number), skid TEXT NOT NULL REFERENCES members (skid),
    idem TEXT NOT NULL, blob TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
    arrays INTEGER NOT NULL, site_sha256 TEXT NOT NULL, accepted_ms INTEGER NOT NULL, PRIMARY KEY (number, skid)
) STRICT;
CREATE TABLE broadcasts (
    number INTEGER NOT NULL, skid TEXT NOT NULL REFERENCES members (skid), blob TEXT NOT NULL UNIQUE,
    sha256 TEXT NOT NULL, PRIMARY KEY (number, skid)
) STRICT;
CREATE TABLE states (number INTEGER PRIMARY KEY, blob TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL) STRICT;
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE bundles (
    line TEXT NOT NULL, task TEXT NOT NULL, version INTEGER NOT NULL, bundle_id TEXT NOT NULL, sha256 TEXT NOT NULL,
    bytes INTEGER NOT NULL, blob TEXT NOT NULL UNIQUE, published_ms INTEGER NOT NULL, PRIMARY KEY (line, task, version)
) STRICT;
CREATE TABLE audit (
    number INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, event TEXT NOT NULL, subject TEXT NOT NULL,
    detail TEXT NOT NULL, sha256 TEXT NOT NULL
) STRICT;
"""
_M004 = """
CREATE TABLE kept_replies (
    number INTEGER NOT NULL REFERENCES rounds (number), skid TEXT NOT NULL REFERENCES members (skid),
    idem TEXT NOT NULL, blob TEXT UNIQUE, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL, arrays INTEGER NOT NULL,
    site_sha256 TEXT NOT NULL, accepted_ms INTEGER NOT NULL, PRIMARY KEY (number, skid)
) STRICT;
INSERT INTO kept_replies SELECT * FROM replies;
DROP TABLE replies;
ALTER TABLE kept_replies RENAME TO replies;
CREATE TABLE kept_broadcasts (
    number INTEGER NOT NULL, skid TEXT NOT NULL REFERENCES members (skid), blob TEXT UNIQUE, sha256 TEXT NOT NULL,
    others INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (number, skid)
) STRICT;
INSERT INTO kept_broadcasts SELECT * FROM broadcasts;
DROP TABLE broadcasts;
ALTER TABLE kept_broadcasts RENAME TO broadcasts;
CREATE TABLE kept_states (number INTEGER PRIMARY KEY, blob TEXT UNIQUE, sha256 TEXT NOT NULL) STRICT;
INSERT INTO kept_states SELECT * FROM states;
DROP TABLE states;
ALTER TABLE kept_states RENAME TO states;
"""
_M006 = """
CREATE TABLE member_keys (
    skid TEXT PRIMARY KEY, member TEXT NOT NULL REFERENCES members (skid), signing_public BLOB NOT NULL,
    added_ms INTEGER NOT NULL, until_ms INTEGER, record BLOB
) STRICT;
CREATE TABLE revocations (
    key_id TEXT PRIMARY KEY, kind TEXT NOT NULL CHECK (kind IN ('member', 'signer')), name TEXT NOT NULL,
    revoked_ms INTEGER NOT NULL
) STRICT;
INSERT INTO revocations SELECT skid, 'member', name, COALESCE(revoked_ms, 0) FROM members
    WHERE state = 'revoked' AND approved_ms IS NOT NULL;
ALTER TABLE bundles ADD COLUMN signers TEXT NOT NULL DEFAULT '[]';
CREATE TABLE roots (version INTEGER PRIMARY KEY, record BLOB NOT NULL, published_ms INTEGER NOT NULL) STRICT;
"""
_M005 = """
CREATE TABLE uploads (
    skid TEXT NOT NULL REFERENCES members (skid), id TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    have INTEGER NOT NULL CHECK (have BETWEEN 0 AND size), blob TEXT NOT NULL UNIQUE, touched_ms INTEGER NOT NULL,
    PRIMARY KEY (skid, id)
) STRICT;
CREATE TABLE offers (
    id TEXT PRIMARY KEY, skid TEXT NOT NULL REFERENCES members (skid), blob TEXT NOT NULL, bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL, UNIQUE (skid, blob)
) STRICT;
"""
