"""What a bundle's signer vouches for: release, validity and the hash of every member; and the signatures themselves.

Guarantees: a `Manifest` that exists satisfies every form below. The reader takes exactly the documented keys.

    manifest.json    {"format": 1, "federation": name|null, "line", "task", "version": int >= 1, "min_client",
                      "min_runtime", "created": ms, "expires": ms|null, "members": [{"name", "size", "sha256"}]},
                     members in name order
    signatures.json  [{"keyid": 64 hex, "alg": "ed25519", "sig": hex}] over PAE("eflb1/manifest", manifest bytes)

Times are milliseconds since 1970 (UTC). Other values of `alg` are room for a second, quantum-safe signature; they are
never counted. Source: docs/design.md 7; docs/security.md 2.8.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgefl_protocol.bundle.archive import MEMBER_NAME
from edgefl_protocol.distribution import VERSION
from edgefl_protocol.errors import BundleError
from edgefl_protocol.records.record_form import MAX_AHEAD_MS
from edgefl_protocol.sentences import expiry, span
from edgefl_protocol.strict_json import MAX_INT, UnknownKeysError, check_keys, parse_json, write_json

FORMAT = 1
SIGNING_LABEL = "eflb1/manifest"
CLIENT_VERSION = VERSION  # what `min_client` is compared with
MAX_SIGNATURES = 16

REQUIRED_MEMBERS = frozenset({"score.onnx", "weights.safetensors", "preprocess.json", "labels.json", "card.json"})
OPTIONAL_MEMBERS = frozenset(
    {"train_step.onnx", "training.json", "encode.onnx", "questions.json", "tokenizer.json", "answers.json"}
)  # nobody writes or reads the last two; a bundle that holds them loads as it always did

_KEYS = {
    "format",
    "federation",
    "line",
    "task",
    "version",
    "min_client",
    "min_runtime",
    "created",
    "expires",
    "members",
}
_WORD = re.compile(r"[a-z0-9-]{1,32}")
_RELEASE = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}")
_HASH = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"([0-9a-f]{2}){1,8192}")


@dataclass(frozen=True, kw_only=True)
class BundleFields:
    """What the publisher of a bundle decides."""

    federation: str | None  # `[a-z0-9-]{1,32}`, or None for a model of no federation
    line: str  # product line within the federation; versions are counted per (federation, line, task)
    task: str  # what is told apart, such as `all` or `nevus`
    version: int  # 1 or more, higher than every published one of the same (federation, line, task)
    created_ms: int  # time of publication
    expires_ms: int | None = None  # the device refuses the bundle from then on; None for never
    min_client: str = CLIENT_VERSION  # oldest edgefl that can read it, such as `0.1.0`
    min_runtime: str = "1.23"  # oldest onnxruntime that can run it, such as `1.23`


@dataclass(frozen=True)
class BundleMember:
    """One file inside a bundle: name, size in bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The signed record of a bundle; the attributes of `BundleFields` and the members.

    Raises:
        BundleError: a value is not of the documented form (`bad_manifest`).
    """

    federation: str | None
    line: str
    task: str
    version: int
    created_ms: int
    expires_ms: int | None
    min_client: str
    min_runtime: str
    members: tuple[BundleMember, ...]

    def __post_init__(self) -> None:
        for name, word in (("federation", self.federation), ("line", self.line), ("task", self.task)):
            if name != "federation" or word is not None:
                _expect(isinstance(word, str) and _WORD.fullmatch(word), f"{name} is not 1 to 32 of a-z, 0-9 and -")
        _expect(_whole(self.version, 1, 2**31), "version is not a whole number from 1 to 2^31")
        _expect(_whole(self.created_ms, 0, MAX_INT), "created is not a time in milliseconds")
        _expect(self.expires_ms is None or _whole(self.expires_ms, 0, MAX_INT), "expires is not a time or null")
        for name, release in (("min_client", self.min_client), ("min_runtime", self.min_runtime)):
            _expect(isinstance(release, str) and _RELEASE.fullmatch(release), f"{name} is not a version like 1.23.0")
        names = [member.name for member in self.members]
        _expect(names == sorted(set(names)), "members are not in the order of their names, or one is listed twice")
        for member in self.members:
            _expect(MEMBER_NAME.fullmatch(member.name), "a member's name is not one like score.onnx")
            _expect(_whole(member.size, 0, MAX_INT), "a member's size is not a whole number")
            _expect(isinstance(member.sha256, str) and _HASH.fullmatch(member.sha256), "a sha256 is not 64 hex digits")

    @property
    def line_key(self) -> tuple[str | None, str, str]:
        """(federation, line, task): versions are counted and compared within this."""
        return self.federation, self.line, self.task

    @property
    def id(self) -> str:
        """federation/line/task, `-` for no federation; the same for every version. For programs."""
        return "/".join((self.federation or "-", self.line, self.task))

    @property
    def name(self) -> str:
        """The id as a person reads it: line/task where there is no federation."""
        return self.id.removeprefix("-/")

    def to_bytes(self) -> bytes:
        """Write `manifest.json`; equal manifests give equal bytes."""
        members = [{"name": m.name, "size": m.size, "sha256": m.sha256} for m in self.members]
        return write_json(
            {
                "format": FORMAT,
                "federation": self.federation,
                "line": self.line,
                "task": self.task,
                "version": self.version,
                "min_client": self.min_client,
                "min_runtime": self.min_runtime,
                "created": self.created_ms,
                "expires": self.expires_ms,
                "members": members,
            }
        )


@dataclass(frozen=True)
class Signature:
    """One signature over the manifest; `sig` in bytes, `keyid` in hex."""

    keyid: str
    alg: str
    sig: bytes


def parse_manifest(data: bytes) -> Manifest:
    """Read `manifest.json`."""
    record = _parse(data, "manifest.json", "bad_manifest")
    if isinstance(record, dict) and "format" in record and (type(record["format"]), record["format"]) != (int, FORMAT):
        raise BundleError(
            f"the bundle is not of format {FORMAT}, the only one that this version reads; update edgefl-derm",
            "unknown_format",
        )
    try:
        record = check_keys(record, _KEYS)
    except UnknownKeysError as error:
        raise _bad(str(error), f"update edgefl-derm, this is {CLIENT_VERSION}") from error
    except ValueError as error:
        raise _bad(str(error)) from error
    if not isinstance(record["members"], list):
        raise _bad("members is not a list")
    members = []
    for entry in record["members"]:
        if (
            not isinstance(entry, dict)
            or set(entry) != {"name", "size", "sha256"}
            or not isinstance(entry["name"], str)
        ):
            raise _bad("a member is not {name, size, sha256}")
        members.append(BundleMember(entry["name"], entry["size"], entry["sha256"]))
    return Manifest(
        federation=record["federation"],
        line=record["line"],
        task=record["task"],
        version=record["version"],
        created_ms=record["created"],
        expires_ms=record["expires"],
        min_client=record["min_client"],
        min_runtime=record["min_runtime"],
        members=tuple(members),
    )


def parse_signatures(data: bytes) -> tuple[Signature, ...]:
    """Read `signatures.json`."""
    record = _parse(data, "signatures.json", "bad_signatures")
    problem = BundleError(
        "signatures.json is not a list of 1 to 16 {keyid, alg, sig}; fetch it again", "bad_signatures"
    )
    if not isinstance(record, list) or not 1 <= len(record) <= MAX_SIGNATURES:
        raise problem
    found: list[Signature] = []
    for entry in record:
        if not isinstance(entry, dict) or set(entry) != {"keyid", "alg", "sig"}:
            raise problem
        forms = (("keyid", _HASH), ("alg", _WORD), ("sig", _SIGNATURE))
        if not all(isinstance(entry[key], str) and form.fullmatch(entry[key]) for key, form in forms):
            raise problem
        found.append(Signature(entry["keyid"], entry["alg"], bytes.fromhex(entry["sig"])))
    if len({(s.keyid, s.alg) for s in found}) != len(found) or data != write_signatures(found):
        raise problem  # one way to write it, so that no byte of a bundle can change unseen
    return tuple(found)


def write_signatures(signatures: Sequence[Signature]) -> bytes:
    """Write `signatures.json`."""
    return write_json([{"keyid": s.keyid, "alg": s.alg, "sig": s.sig.hex()} for s in signatures])


def check_validity(
    manifest: Manifest, now_ms: int, last_seen: Mapping[tuple[str | None, str, str], int] | None
) -> None:
    """Refuse a bundle past its time or from the future, that needs a newer version, or is older than one seen before.

    A number that a wrong date brought into use would be in the way of every later one. One that is in use already was
    judged by signed time when it came: a clock that is behind since then does not end its use.
    """
    seen = (last_seen or {}).get(manifest.line_key, 0)
    if manifest.expires_ms is not None and now_ms >= manifest.expires_ms:
        told = expiry(manifest.expires_ms - now_ms)
        raise BundleError(f"the bundle {told}; fetch a newer one, or check this clock", "expired")
    if (ahead_ms := manifest.created_ms - now_ms) > MAX_AHEAD_MS and manifest.version > seen:
        raise BundleError(
            f"the bundle is dated {span(ahead_ms)} ahead of this machine's clock; set the clock if it is behind, else "
            "ask the publisher for a bundle with the right date",
            "from_future",
        )
    if release(manifest.min_client) > release(CLIENT_VERSION):
        raise BundleError(
            f"the bundle needs edgefl-derm {manifest.min_client} or newer, and this is {CLIENT_VERSION}; update "
            "edgefl-derm",
            "client_too_old",
        )
    if manifest.version < seen:
        raise BundleError(
            f"the bundle is version {manifest.version}, but version {seen} was in use before, and a device never goes "
            f"back; use version {seen} or a newer one. If version {seen} was bad, its publisher exports the old "
            f"content again as version {seen + 1}: edgefl-export bundle --version {seen + 1}",
            "rolled_back",
        )


def check_update(current: Manifest, new: Manifest) -> None:
    """Refuse a bundle that may not replace the current one: other federation, line or task, or not a higher version.

    Raises:
        BundleError: `other_line` or `rolled_back`.
    """
    if new.line_key != current.line_key:
        raise BundleError(
            f"the bundle is for {new.name}, but this device runs {current.name}; ask for a bundle of that line",
            "other_line",
        )
    if new.version <= current.version:
        raise BundleError(
            f"the bundle is version {new.version}, and this device already runs version {current.version}; fetch a "
            "higher one",
            "rolled_back",
        )


def release(version: str) -> tuple[int, ...]:
    """Turn `1.23` into (1, 23, 0), which compares as versions do."""
    numbers = tuple(int(part) for part in version.split("."))
    return numbers + (0,) * (3 - len(numbers))


def _parse(data: bytes, name: str, code: str) -> object:
    try:
        return parse_json(data)
    except ValueError as error:
        raise BundleError(f"{name} is not strict JSON: {error}; fetch the bundle again", code) from error


def _whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _expect(holds: object, found: str) -> None:
    if not holds:
        raise _bad(found)


def _bad(found: str, advice: str = "ask the publisher for a correct bundle") -> BundleError:
    return BundleError(f"manifest.json is refused: {found}; {advice}", "bad_manifest")
