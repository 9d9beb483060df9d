"""The coordinator's settings: one frozen object, read once from `config.toml` in its home; and where its files lie.

Guarantees: every value was checked for type and bounds; an unknown key is an error, so a misspelt setting never passes
silently; nothing else reads the environment or this file. Source: docs/security.md, decisions 7 to 9.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qs, urlsplit

import msgspec

from edgefl_coordinator.errors import OperatorError
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.envelopes.blob import MAX_BLOB_BYTES
from edgefl_protocol.errors import MapsError
from edgefl_protocol.fields import Plain
from edgefl_protocol.records.invite import names_host
from edgefl_protocol.rules.bounds import MOST_EPOCHS, MOST_SEED
from edgefl_protocol.rules.maps import MAX_MAPS, sent_maps_in
from edgefl_protocol.tensors import MAX_TENSORS

LEAST_COHORT = 2  # others without which a contribution can be told apart: docs/security.md, exchange policy
USUAL_COHORT = 3  # others that a broadcast holds where there are enough members
_WORD = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_METHOD = re.compile(r"[a-z][a-z0-9_-]{0,39}|[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # a name of METHODS, or module:Class
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
          "object": "a table", ">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}  # fmt: skip
_WANTED = re.compile(r"\b(?:int|float|str|bool|array|object)\b|[<>]=?")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.+)`")  # in a sentence of msgspec
_MOST_DEADLINE_S = 2**30  # 34 years; folders of earlier versions may hold what was no limit then
_AGREED = ("federation", "suite", "root_key_id", "rounds.count")  # never change, as the task but for this:
_CLAIM = "task.max_samples"
_MAX_CONFIG_BYTES = 256 * 2**10
_MAX_BODY_BYTES = 32 * 2**20
_OTHER_TENSORS = 500  # room in a payload for what a server's state holds beside maps

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # more than a member reads in the task
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the federation learns."""

    method: str  # a name of the method table, or module:Class for one of your own
    name: str
    line: str = "main"  # the line of bundles that belongs to the task
    classes: tuple[str, ...]  # in index order
    seed: Annotated[int, msgspec.Meta(ge=0, le=MOST_SEED)] = 0  # of everything drawn on the server
    epochs: Annotated[int, msgspec.Meta(ge=1, le=MOST_EPOCHS)] = 1  # local epochs of one round
    shares_maps: bool = True  # replies hold rollout maps only, and are checked as such
    maps_per_class: Positive = MAX_MAPS  # M, most maps a site may send for one class
    max_samples: Positive = 1_000_000  # most images a site may claim; they weigh its reply: near the largest site's
    backbone: Mapping[str, Any]  # fields of the backbone's description that site and server agree on
    settings: Mapping[str, Plain] = {}  # hyper-parameters; `init` names them all, others have the method's default
    travels: tuple[str, ...] = ()  # what replies hold, as `edgefl-train methods` tells it; members see it

    def __post_init__(self) -> None:
        for name in ("backbone", "settings"):  # no item can be set later, and a list equals its tuple
            plain = {key: tuple(item) if isinstance(item, list) else item for key, item in getattr(self, name).items()}
            msgspec.structs.force_setattr(self, name, MappingProxyType(plain))
        try:
            sent_maps_in(self.settings)
        except MapsError as error:
            raise ValueError("sent_maps must be each or mean") from error
        if _METHOD.fullmatch(self.method) is None:
            raise ValueError(f"method {self.method!r} is neither a method's name nor module:Class")
        if _WORD.fullmatch(self.name) is None or _WORD.fullmatch(self.line) is None:
            raise ValueError("task name and line must be 1 to 32 lower-case letters, digits or '-'")
        if len(self.classes) < 2 or len(set(self.classes)) != len(self.classes):
            raise ValueError(
                f"classes must hold at least two names, all different; found: {', '.join(self.classes) or 'none'}"
            )
        patch, image_px = self.backbone.get("patch"), self.backbone.get("image_px")
        if self.convolutional:
            if self.shares_maps or not isinstance(image_px, int) or image_px < 1:
                raise ValueError("a convolutional backbone needs image_px in pixels, and shares_maps = false")
        elif not isinstance(patch, int) or not isinstance(image_px, int) or patch < 1 or image_px % patch:
            raise ValueError("backbone needs image_px and patch in pixels, and image_px must be a multiple of patch")

    @property
    def convolutional(self) -> bool:
        """Whether the backbone is a convolutional network: it names its architecture and has no patches."""
        return "architecture" in self.backbone

    @property
    def tokens(self) -> int:
        """Patch tokens N of a rollout map; 0 with a convolutional backbone."""
        return 0 if self.convolutional else int(self.backbone["image_px"] // self.backbone["patch"]) ** 2

    @property
    def most_arrays(self) -> int | None:
        """Most maps of all members together, an array a class, that fit one payload; None where no maps travel."""
        return MAX_TENSORS - _OTHER_TENSORS if self.shares_maps else None


class RoundSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many rounds there are, and when one opens and closes (`rounds.states`)."""

    count: Count  # training rounds R of the method, which adds its own first and last exchange
    quorum_min: Count = 2  # replies below which a round is not aggregated
    quorum_target: Count = 3  # replies at which it closes early
    deadline_s: Annotated[int, msgspec.Meta(ge=1, le=_MOST_DEADLINE_S)] = 3600  # from opening to the deadline
    start: Literal["automatic", "manual"] = "automatic"  # opens the first once `quorum_target` members are approved
    min_cohort: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = USUAL_COHORT  # other contributors a broadcast needs
    allow_small_cohort: bool = False  # permit `min_cohort` below 2; written to the audit log at every start

    def __post_init__(self) -> None:
        if self.quorum_min > self.quorum_target:
            raise ValueError(
                f"rounds.quorum_min ({self.quorum_min}) must not be above rounds.quorum_target ({self.quorum_target})"
            )
        if self.small_cohort and not self.allow_small_cohort:
            raise ValueError(
                f"with rounds.min_cohort {self.min_cohort} a site's contribution can be told apart; use {LEAST_COHORT} "
                "or more, or allow it with rounds.allow_small_cohort true (with init: --allow-small-cohort)"
            )

    @property
    def small_cohort(self) -> bool:
        """Whether a broadcast may hold so few others' contributions that they can be told apart."""
        return self.min_cohort < LEAST_COHORT


class ProtectionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What bounds one member's weight in a round, and how far it moves the result (`rounds.protection.bounding`)."""

    rule: Literal["clip", "median", "trimmed-mean", "mixed-mean", "multi-krum", "mean"] = "clip"
    claim_most: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.5  # times the median count of images
    norm_most: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 2.0  # times the median length of an update; for "clip"
    hostile: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.2  # share of members that "trimmed-mean" and Krum expect
    # command that judges what a round made (`rounds.operator_gate`), its program relative to the home; "": none
    gate: str = ""

    def __post_init__(self) -> None:
        try:
            shlex.split(self.gate)
        except ValueError as error:
            raise ValueError(f"protection.gate is no command: {error}") from error


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the HTTP side and of the aggregation worker."""

    body_bytes: Positive = _MAX_BODY_BYTES  # of a request
    reply_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOB_BYTES)] = 16 * 2**20  # above 1 MiB: as a blob
    open_blobs: Positive = 2  # that a member may be sending at once; a new one pushes out the one that rested longest
    blob_age_s: Positive = 24 * 3600  # without a piece; then an unfinished blob is deleted
    header_deadline_s: Seconds = 10.0  # for a request's whole header
    body_deadline_s: Seconds = 30.0  # for its body; what has arrived of it gives it more
    body_bytes_per_s: Positive = 32 * 2**10  # so many bytes of a body give it a second more: the least rate
    connections: Positive = 1000  # open connections; above it they are closed unheard
    one_address: Positive = 500  # of them from one address, of IPv6 one /64; behind a proxy that ends TLS all of them
    waiting_bytes: Positive = 128 * 2**20  # bodies above 64 KiB in memory at once; above it 503
    open_per_minute: Positive = 60  # requests of one address to each of /v1/time, /v1/enrol and /v1/root
    skew_ms: Positive = 300_000  # clock difference accepted in an envelope
    lifetime_ms: Positive = 600_000  # longest validity of an envelope
    worker_s: Positive = 3600  # longest run of the aggregation worker
    gate_s: Positive = 600  # longest run of the gate in it

    def __post_init__(self) -> None:
        if not min(self.reply_bytes + 64 * 2**10, _MAX_BODY_BYTES) <= self.body_bytes <= _MAX_BODY_BYTES:
            raise ValueError(
                "limits.body_bytes must be at most 33554432, and at most 65536 above "
                "limits.reply_bytes if that is smaller"
            )


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is configured."""

    federation: str  # name on the wire
    public_url: str  # base address that members use, https://…
    host: str = "127.0.0.1"  # address to listen on
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8443  # to listen on; 0 picks a free one
    suite: Literal[1, 2] = 2  # of the coordinator's sealing key
    certificate: str = "tls/server.pem"  # PEM chain for TLS, relative to the home
    certificate_key: str = "tls/server.key"  # its private key
    ca: str = "tls/ca.pem"  # PEM file whose first certificate invites pin; "" for a public authority
    proxy_ends_tls: bool = False  # a reverse proxy, not this server, has the certificate that members meet
    root_key_id: str = ""  # of the federation's offline root key; "" for none
    database: str = ""  # postgresql://… for a store that several processes share; "" for the file in the folder
    payloads: str = ""  # s3://BUCKET/PREFIX for blobs that servers on several machines share; "" for the folder
    task: TaskSettings
    rounds: RoundSettings
    protection: ProtectionSettings = ProtectionSettings()
    limits: LimitSettings = LimitSettings()

    def __post_init__(self) -> None:
        if _WORD.fullmatch(self.federation) is None:
            raise ValueError(f"federation {self.federation!r} must be 1 to 32 lower-case letters, digits or '-'")
        if not self.public_url.startswith("https://"):
            raise ValueError(f"public_url {self.public_url!r} must begin with https://")
        if not names_host(self.public_url):
            raise ValueError(
                f"public_url {self.public_url!r} has no host and port that can be read: write it as https://HOST or "
                "https://HOST:PORT, an IPv6 address in brackets"
            )
        if self.database and not self.database.startswith(("postgresql://", "postgres://")):
            raise ValueError("database must begin with postgresql://, or be empty for the file in the folder")
        if self.payloads and not self.payloads.startswith("s3://"):
            raise ValueError("payloads must begin with s3://, or be empty for the folder")
        if _holds_password(self.database):
            raise ValueError("database holds a password: put it into a password file (PGPASSFILE, or ~/.pgpass)")


class CoordinatorHome:
    """The coordinator's folder: where each file lies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"  # settings
        self.database = root / "store.sqlite"
        self.heads = root / "audit-heads"  # signed heads of the audit log; no secret
        self.blobs = root / "blobs"  # replies, states, broadcasts and bundles; each named by the store
        self.jobs = root / "jobs"  # working folders of the aggregation worker
        self.keys = root / "keys"  # private keys, mode 0700
        self.sealing_ring = self.keys / "sealing.json"  # the current sealing key and those that still open messages
        self.signing = self.keys / "signing.key"
        self.signing_public = self.keys / "signing.pub"  # its public half, which a root set lists
        self.next_signing = self.keys / "next-signing.key"  # waits for a root set to list it
        self.next_public = self.keys / "next-signing.pub"
        self.tls = root / "tls"  # certificate, its key, and the development CA's certificate
        self.socket = root / "admin.sock"  # administration, mode 0600, present while `serve` runs
        self.lock = root / "coordinator.lock"  # held by whoever has the store open


def load_settings(home: CoordinatorHome) -> CoordinatorSettings:
    """Read and check `config.toml`.

    An `OperatorError` where it is missing, no TOML, or a setting is unknown or out of bounds; a `StorageError` where it
    cannot be read.
    """
    if not home.config.exists():
        raise OperatorError(f"{home.root} holds no coordinator; make one with: edgefl-coordinator init {home.root}")
    text = ""
    try:
        text = read_bounded(home.config, _MAX_CONFIG_BYTES).decode()
        return settings_from_table(tomllib.loads(text))
    except ValueError as error:  # TOMLDecodeError, which tells its line, and UnicodeDecodeError are ValueErrors
        line = _line_of(text, str(error).partition(";")[0])
        raise OperatorError(f"{home.config}{f', line {line}' if line else ''}: {error}") from error


def _line_of(text: str, sentence: str) -> int | None:
    """Return the number of the line that sets what a sentence names first, or None."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.]+)\]", line):
            section = f"{header[1]}."
        elif key := re.match(r"\s*(\w+)\s*=", line):
            lines |= {f"{section}{key[1]}": number, key[1]: lines.get(key[1], number)}
    return next((lines[word] for word in re.findall(r"\w+(?:\.\w+)*", sentence) if word in lines), None)


def settings_from_table(table: Mapping[str, Any]) -> CoordinatorSettings:
    """Build settings from parsed TOML.

    A `ValueError` for an unknown or missing key, a wrong type, or a value out of bounds.
    """
    try:
        return msgspec.convert(table, CoordinatorSettings)
    except msgspec.ValidationError as error:
        raise ValueError(_sentence(str(error), table)) from error


def settings_to_table(settings: CoordinatorSettings) -> dict[str, Any]:
    """Return the plain nested dict that TOML can hold; `settings_from_table` reads it back."""
    table: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=dict)
    for name in ("database", "payloads"):
        if not table[name]:
            del table[name]  # a version from before it reads this, too
    return table


def by_name(settings: CoordinatorSettings) -> dict[str, Any]:
    """Return the full name of each setting → its value, such as `rounds.count` and `task.settings.lr`."""
    return dict(_named("", settings_to_table(settings)))


def _named(before: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _named(f"{before}{name}.", value)
        else:
            yield before + name, value


def agreed(settings: CoordinatorSettings) -> dict[str, Any]:
    """Return, of `by_name`, what members rely on or keys were made with: it never changes."""
    found = by_name(settings).items()
    return {name: value for name, value in found if name in _AGREED or (name.startswith("task.") and name != _CLAIM)}


def _holds_password(url: str) -> bool:
    """Find the usual places of one; the driver, which is not needed to read settings, finds all before it connects.

    A `ValueError` where the URL cannot be read.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(
            "database has no host that can be read: write it as postgresql://USER@HOST/NAME, an IPv6 address in "
            "brackets"
        ) from error
    return parts.password is not None or "password" in parse_qs(parts.query, keep_blank_values=True)


def _sentence(message: str, table: Mapping[str, Any]) -> str:
    """Say what msgspec found with the setting's full name, its value and what is allowed."""
    what, _, place = message.partition(" - at `$.")
    names = [name.partition("[")[0] for name in place.removesuffix("`").split(".") if name]
    kind: Any = CoordinatorSettings
    found: Any = table
    for name in names:
        kind = {field.name: field.type for field in msgspec.structs.fields(kind)}[name]
        found = found[name]
    if field := _FIELD.fullmatch(what):
        setting = ".".join([*names, field[2]])
        known = ", ".join(sorted(one.name for one in msgspec.structs.fields(kind)))
        return (
            f"unknown setting {setting}; known: {known}"
            if "unknown" in field[1]
            else f"the setting {setting} is missing"
        )
    shown = f"{'.'.join(names)} is {found!r}"
    if what.startswith("Invalid enum value"):
        return f"{shown}; allowed: {', '.join(map(str, get_args(kind)))}"
    if what.startswith("Expected "):
        needed = what.removeprefix("Expected ").partition(", got")[0].replace("`", "")
        return f"{shown}; it must be {_WANTED.sub(lambda found: _WORDS[found[0]], needed)}"
    return what  # ours, of a check above
