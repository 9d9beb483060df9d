"""Payloads in a bucket of an S3-compatible store, which servers on several machines share.

    PREFIX/owner                        whose the prefix is
    PREFIX/leader                       what the last that led wrote into its database, too
    PREFIX/payloads/NAME                a payload, sealed in chunks (edgefl_protocol.envelopes.blob)
    PREFIX/uploads/NAME/OFFSET-LENGTH   a piece of an upload, as its sender sealed it

Guarantees: a call that puts returns once the store has acknowledged. Each payload is sealed under a key of its own,
which follows from the coordinator's secret and the payload's name, so whoever runs the store reads none of it, and an
object that was cut, changed or exchanged does not open. Connections are TLS, but to this machine. Credentials are
read by the library, from the environment or the machine's role, and stand in no text. Source: docs/security.md 2.2,
reliability; docs/decisions/0061.
"""

import contextlib
import hmac
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.payloads.payloads import MAX_PAYLOAD_BYTES
from edgefl_protocol import durable
from edgefl_protocol.envelopes.blob import (
    CHUNK_BYTES,
    open_chunks,
    open_middle,
    opened_size,
    seal_chunks,
    sealed_size,
)
from edgefl_protocol.errors import BlobError, StorageError
from edgefl_protocol.pae import pae

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # as the library reads them
_RETRIES: "Final[RetryConfig]" = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
_TIMES: "Final[ClientConfig]" = {"connect_timeout": "5s", "read_timeout": "20s", "timeout": "10m"}
_AT_ONCE: Final = 8 * 2**20  # bytes of an object that is sent in one request
_PATIENCE: Final = 3  # names that are not deleted, each after `_RETRIES`, before the others are left, too
_ROOM: Final = 2**62
_SPELLED: Final = "s3://BUCKET/PREFIX, with ?region=NAME and &endpoint=https://HOST where the store is not Amazon's"


class S3Payloads:
    """Payloads below a prefix that is one coordinator's alone."""

    shared = True

    def __init__(self, url: str, secret: bytes) -> None:
        """Name the place; nothing connects yet.

        Args:
            url: `s3://BUCKET/PREFIX`, with `region` and `endpoint` as its query.
            secret: the coordinator's, from which keys are derived.

        An `OperatorError` where the URL is none, or would be called without TLS.
        """
        bucket, prefix, region, endpoint = _read(url)
        self._place = f"s3://{bucket}/{prefix}"
        self.described = f"payloads in {self._place}"
        self._secret = secret
        config: S3Config = {"disable_bulk_delete": True}  # some stores answer it in a form of their own
        if region:
            config["region"] = region
        if endpoint:
            config["aws_endpoint_url_s3"] = endpoint
        plain = endpoint.startswith("http://")
        client: ClientConfig = {**_TIMES, "allow_http": plain, "allow_invalid_certificates": False}
        try:
            self._store = S3Store(bucket, prefix=prefix, config=config, client_options=client, retry_config=_RETRIES)
        except BaseError as error:
            raise OperatorError(f"the settings of {self.described} do not fit: write {_SPELLED}", USAGE) from error

    def claim(self, owner: str) -> None:
        """Write down whose the prefix is, or compare; an `OperatorError` where it is another's, or holds something."""
        with self._asked("owner"):
            if (found := self._read("owner")) is None:
                self._refuse_used()
                with contextlib.suppress(AlreadyExistsError):  # another's, who came at once, or this one's, sent twice
                    obstore.put(self._store, "owner", owner.encode(), mode="create")
                found = self._read("owner") or b""
        if not hmac.compare_digest(found, owner.encode()):
            raise OperatorError(f"{self._place} belongs to another coordinator: give each a prefix of its own")

    def lead(self, known: Collection[str], fresh: str) -> None:
        """Write the `leader` object, where it says what the database knows, or is not there."""
        with self._asked("leader"):
            found = self._read("leader")
            if found is not None and found.decode(errors="replace") not in known:
                raise OperatorError(
                    f"another copy of this coordinator has led with {self._place} since: give a copy a prefix of its "
                    "own; to go on with this one, restore what lies below the prefix, or remove the object leader there"
                )
            obstore.put(self._store, "leader", fresh.encode())

    def try_out(self) -> None:
        """Write and remove an object; an `OperatorError` where something lies below the prefix."""
        with self._asked("owner"):
            self._refuse_used()
            obstore.put(self._store, "owner", b"tried")
            obstore.delete(self._store, "owner")

    def clear(self) -> None:
        """Remove all that lies below the prefix."""
        with self._asked("list"):
            self._delete([one["path"] for batch in obstore.list(self._store) for one in batch])

    def _read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return bytes(obstore.get(self._store, name).bytes())
        return None

    def _refuse_used(self) -> None:
        if any(obstore.list(self._store, chunk_size=1)):
            raise OperatorError(f"there are objects below {self._place}: choose a prefix that holds nothing", USAGE)

    def put(self, name: str, data: bytes) -> None:
        """Seal and send a payload."""
        self._send(name, (data,), len(data))

    def put_files(self, files: Mapping[str, Path]) -> None:
        """Seal and send files, piece by piece."""
        for name, path in files.items():
            self._send(name, durable.read_pieces(path, MAX_PAYLOAD_BYTES), durable.file_bytes(path))

    def _send(self, name: str, pieces: Iterable[bytes], size: int) -> None:
        chunks = seal_chunks(pieces, self._key(name))
        with self._asked(name):
            if size <= _AT_ONCE:
                obstore.put(self._store, f"payloads/{name}", b"".join(chunks), use_multipart=False)
            else:
                obstore.put(self._store, f"payloads/{name}", chunks)

    def begin(self, name: str) -> None:
        """Do nothing: each piece is an object."""

    def put_piece(self, name: str, offset: int, data: bytes) -> None:
        """Send a piece under a name that says where it lies, so that no other piece takes its place."""
        with self._asked(name):
            obstore.put(self._store, f"uploads/{name}/{offset}-{len(data)}", data, use_multipart=False)

    def upload(self, name: str) -> Iterator[bytes]:
        """Give the pieces of an upload in their order, without what is there twice."""
        at = 0
        with self._asked(name):
            held = sorted(_place(found["path"]) for found in self._listed(f"uploads/{name}"))
            for offset, length in held:
                if offset <= at < offset + length:
                    yield bytes(obstore.get(self._store, f"uploads/{name}/{offset}-{length}").bytes())[at - offset :]
                    at = offset + length

    def pieces(self, name: str) -> Iterator[bytes]:
        """Fetch and open a payload."""
        with self._asked(name):
            found = obstore.get(self._store, f"payloads/{name}")
            self._opened_size(name, found.meta["size"])
            yield from open_chunks(map(bytes, found.stream()), self._key(name))

    @contextlib.contextmanager
    def reading(self, name: str, ahead: int) -> Iterator[Callable[[int, int], bytes]]:
        """Fetch whole chunks, so many that what is read next is among them, and open them."""
        size, key = self.size(name), self._key(name)
        begins, held = 0, b""

        def read(offset: int, length: int) -> bytes:
            nonlocal begins, held
            end = min(offset + length, size)
            if offset >= end:
                return b""
            if not begins <= offset <= end <= begins + len(held):
                first = offset // CHUNK_BYTES
                last = min(-(-size // CHUNK_BYTES), -(-(offset + max(length, ahead)) // CHUNK_BYTES) + 1)
                sealed = sealed_size(first * CHUNK_BYTES) if first else 0, sealed_size(min(size, last * CHUNK_BYTES))
                with self._asked(name):
                    found = obstore.get_range(self._store, f"payloads/{name}", start=sealed[0], end=sealed[1])
                    begins, held = first * CHUNK_BYTES, open_middle(bytes(found), first, size, key)
            return held[offset - begins : end - begins]

        yield read

    def size(self, name: str) -> int:
        """Ask the store for an object's length."""
        with self._asked(name):
            return self._opened_size(name, obstore.head(self._store, f"payloads/{name}")["size"])

    def _opened_size(self, name: str, sealed_bytes: int) -> int:
        if (size := opened_size(sealed_bytes)) > MAX_PAYLOAD_BYTES:
            raise StorageError(f"the payload {name} is longer than {MAX_PAYLOAD_BYTES} bytes", "too_large")
        return size

    def file_of(self, name: str, spare: Path) -> Path:
        """Fetch a payload into a file."""
        with spare.open("wb") as file:
            for piece in self.pieces(name):
                file.write(piece)
        return spare

    def names(self, before_s: float | None = None) -> set[str]:
        """List what lies here."""
        found: set[str] = set()
        with self._asked("list"):
            for one in itertools.chain(self._listed("payloads"), self._listed("uploads")):
                if before_s is None or one["last_modified"].timestamp() < before_s:
                    found.add(one["path"].split("/")[1])
        return found

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects and pieces of these names; end where the store gave no answer to several."""
        failed = 0
        for name in names:
            try:
                with self._asked(name):
                    pieces = [one["path"] for one in self._listed(f"uploads/{name}")]
                    self._delete([f"payloads/{name}", *pieces])
            except StorageError as error:
                failed += error.code == "unreachable"
                if failed == _PATIENCE:
                    return

    def _delete(self, paths: list[str]) -> None:
        try:
            obstore.delete(self._store, paths)
        except FileNotFoundError:  # some stores say so, and then the others were not asked for
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, path)

    def free_bytes(self) -> int:
        """Return more than anybody sends: the store says when it is full."""
        return _ROOM

    def _listed(self, below: str) -> Iterator[Any]:
        for batch in obstore.list(self._store, below):
            yield from batch

    def _key(self, name: str) -> bytes:
        return hmac.digest(self._secret, pae(b"payload-key", name.encode()), "sha256")

    @contextlib.contextmanager
    def _asked(self, name: str) -> Iterator[None]:
        """Say in one sentence what an error of the store or of an object means."""
        try:
            yield
        except FileNotFoundError as error:
            raise StorageError(f"there is no {name} in {self._place}, or no such bucket", "missing") from error
        except BlobError as error:
            raise StorageError(f"the payload {name} in {self._place} was cut or changed", "damaged") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            told = f"{self._place} refuses the credentials; look at AWS_ACCESS_KEY_ID and what they may do there"
            raise StorageError(told, "permissions") from error
        except BaseError as error:
            raise StorageError(
                f"{self._place} does not answer; the log of its server says why", "unreachable"
            ) from error


def _read(url: str) -> tuple[str, str, str, str]:
    """Return bucket, prefix, region and endpoint of a URL; the endpoint may also stand in the environment."""
    parts = _parts(url, f"payloads must be {_SPELLED}")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = parts.path.strip("/")
    if parts.scheme != "s3" or not parts.netloc.replace("-", "").replace(".", "").isalnum() or not prefix:
        raise OperatorError(f"payloads must be {_SPELLED}", USAGE)
    if unknown := query.keys() - {"region", "endpoint"}:
        raise OperatorError(f"payloads has no part {min(unknown)}: write {_SPELLED}", USAGE)
    endpoint = query.get("endpoint") or next((os.environ[one] for one in _ENDPOINTS if os.environ.get(one)), "")
    called = _parts(endpoint, "the endpoint of the payloads has no host that can be read: write it as https://HOST")
    if "@" in called.netloc:
        raise OperatorError(
            "the endpoint of the payloads holds a password: credentials stand in the environment", USAGE
        )
    if (
        endpoint
        and called.scheme != "https"
        and (called.scheme, called.hostname) not in [("http", one) for one in _LOOPBACK]
    ):
        raise OperatorError("the endpoint of the payloads must begin with https://, unless it is this machine", USAGE)
    return parts.netloc, prefix, query.get("region", ""), endpoint


def _parts(url: str, otherwise: str) -> SplitResult:
    """Take a URL apart; an `OperatorError` that says `otherwise` where it cannot be read."""
    try:
        return urlsplit(url)
    except ValueError as error:
        raise OperatorError(otherwise, USAGE) from error


def _place(path: str) -> tuple[int, int]:
    offset, _, length = path.rpartition("/")[2].partition("-")
    return int(offset), int(length)
