"""The coordinator's settings: one frozen object, read once from `config.toml` in its home.

Guarantees: every value was checked for type and bounds; an unknown key is an error, so a misspelt setting never passes
silently; nothing else reads the environment or this file. Source: docs/security.md, decisions 7 to 9.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.states import RoundPolicy
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.envelopes.blob import MAX_BLOB_BYTES
from edgefl_protocol.messages.task_reply import Plain as Plain
from edgefl_protocol.tensors import MAX_TENSORS

Settled = TypeVar("Settled")

_WORD = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_METHOD = re.compile(r"[a-z][a-z0-9_-]{0,39}|[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # a name of METHODS, or module:Class
LEAST_COHORT = 3  # others without which a contribution can be told apart: docs/security.md, exchange policy
_MAX_CONFIG_BYTES = 256 * 2**10
_OTHER_TENSORS = 500  # room in a payload for what a server's state holds beside maps


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What the federation learns.

    Attributes:
        method: a name of the method table, or `module:Class` for one of your own.
        name: the task's name.
        line: the line of bundles that belongs to it.
        classes: class names in index order.
        seed: of everything drawn on the server.
        epochs: local epochs of one round.
        shares_maps: the method's replies hold rollout maps only, and are checked as such.
        travels: what the replies hold, as `edgefl-train methods` tells it; members see it in the signed task.
        maps_per_class: M, most maps a site may send for one class.
        max_samples: most images a site may claim; they weigh its reply, so set it near the largest site's.
        backbone: fields of the backbone's description that site and server agree on.
        settings: hyper-parameters of the method; `init` names them all, what is not named has its default.
    """

    method: str
    name: str
    line: str = "main"
    classes: tuple[str, ...]
    seed: int = 0
    epochs: int = 1
    shares_maps: bool = True
    maps_per_class: int = 5
    max_samples: int = 1_000_000
    backbone: Mapping[str, Any]
    settings: Mapping[str, Plain] = field(default_factory=dict)
    travels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if _METHOD.fullmatch(self.method) is None:
            raise ValueError(f"method {self.method!r} is neither a method's name nor module:Class")
        if _WORD.fullmatch(self.name) is None or _WORD.fullmatch(self.line) is None:
            raise ValueError("task name and line take 1 to 32 lower-case letters, digits or '-'")
        if len(self.classes) < 2 or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"classes needs at least two different names, found {list(self.classes)}")
        if self.maps_per_class < 1 or self.epochs < 1 or self.max_samples < 1:
            raise ValueError("maps_per_class, max_samples and epochs are at least 1")
        patch, image_px = self.backbone.get("patch"), self.backbone.get("image_px")
        if self.convolutional:
            if self.shares_maps or not isinstance(image_px, int) or image_px < 1:
                raise ValueError("a convolutional backbone needs image_px in pixels and shares_maps = false")
        elif not isinstance(patch, int) or not isinstance(image_px, int) or patch < 1 or image_px % patch:
            raise ValueError("backbone needs image_px and patch in pixels, image_px a multiple of patch")

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
        """Maps of all members together, an array a class, that the server can hold and hand on in one payload; None
        where replies hold something else."""
        return MAX_TENSORS - _OTHER_TENSORS if self.shares_maps else None


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """How rounds run: `RoundPolicy` plus their number and who opens the first.

    Attributes:
        count: training rounds R of the method; it adds its own first and last exchange to them.
        quorum_min: replies below which a round is not aggregated.
        quorum_target: replies at which it closes early.
        deadline_s: seconds.
        start: "automatic" opens the first round when `quorum_target` members are approved; "manual" waits for `start`.
        min_cohort: other contributors that a broadcast needs.
        allow_small_cohort: permit `min_cohort` below 3; written to the audit log at every start.
    """

    count: int
    quorum_min: int = 2
    quorum_target: int = 3
    deadline_s: int = 3600
    start: Literal["automatic", "manual"] = "automatic"
    min_cohort: int = LEAST_COHORT
    allow_small_cohort: bool = False

    def __post_init__(self) -> None:
        RoundPolicy(quorum_min=self.quorum_min, quorum_target=self.quorum_target, deadline_s=self.deadline_s)
        if self.count < 1:
            raise ValueError(f"rounds is {self.count}, at least 1 is needed")
        if self.start not in ("automatic", "manual"):
            raise ValueError(f"start is {self.start!r}; automatic and manual are allowed")
        if self.min_cohort < 1 or (self.small_cohort and not self.allow_small_cohort):
            raise ValueError(
                f"min_cohort {self.min_cohort} lets a site's contribution be told apart; use {LEAST_COHORT} or more, "
                "or allow it with allow_small_cohort (init: --allow-small-cohort)"
            )

    @property
    def small_cohort(self) -> bool:
        """Whether a broadcast may hold so few others' contributions that they can be told apart."""
        return self.min_cohort < LEAST_COHORT

    @property
    def policy(self) -> RoundPolicy:
        """The part the state machine needs."""
        return RoundPolicy(quorum_min=self.quorum_min, quorum_target=self.quorum_target, deadline_s=self.deadline_s)


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Bounds of the HTTP side.

    Attributes:
        body_bytes: largest request body.
        reply_bytes: largest payload of a method's reply; what is above one body comes as a blob.
        open_blobs: blobs that a member may be sending at once; a new one pushes out the one that rested longest.
        blob_age_s: seconds without a piece after which a blob that was not finished is deleted.
        header_deadline_s: seconds within which a request's header has to be complete.
        body_deadline_s: seconds within which the body has to be complete.
        connections: open sockets; above it 503.
        waiting_bytes: request bodies held in memory at once; above it 503.
        open_per_minute: requests of one address to `/v1/time`, to `/v1/enrol` and to `/v1/root`.
        skew_ms: clock difference accepted in an envelope.
        lifetime_ms: longest validity of an envelope.
        worker_s: longest run of the aggregation worker.
    """

    body_bytes: int = 32 * 2**20
    reply_bytes: int = 16 * 2**20
    open_blobs: int = 2
    blob_age_s: int = 24 * 3600
    header_deadline_s: float = 10.0
    body_deadline_s: float = 60.0
    connections: int = 1000
    waiting_bytes: int = 256 * 2**20
    open_per_minute: int = 60
    skew_ms: int = 300_000
    lifetime_ms: int = 600_000
    worker_s: int = 3600

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"limits.{item.name} must be above 0")
        if self.body_bytes > 32 * 2**20 or self.body_bytes < min(self.reply_bytes + 64 * 2**10, 32 * 2**20):
            raise ValueError("limits.body_bytes is at most 33554432, or 65536 above a smaller limits.reply_bytes")
        if self.reply_bytes > MAX_BLOB_BYTES:
            raise ValueError(f"limits.reply_bytes is at most {MAX_BLOB_BYTES}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is configured.

    Attributes:
        federation: name on the wire, lower-case letters, digits and '-'.
        public_url: base address that members use, https://….
        host: address to listen on.
        port: TCP port to listen on; 0 picks a free one.
        suite: suite of the coordinator's sealing key, 1 or 2.
        certificate: PEM chain for TLS, relative to the home.
        certificate_key: its private key.
        ca: PEM file whose first certificate invites pin, relative to the home; "" for a public authority.
        root_key_id: key id of the federation's offline root key; "" for none.
    """

    federation: str
    public_url: str
    host: str = "127.0.0.1"
    port: int = 8443
    suite: int = 2
    certificate: str = "tls/server.pem"
    certificate_key: str = "tls/server.key"
    ca: str = "tls/ca.pem"
    root_key_id: str = ""
    task: TaskSettings
    rounds: RoundSettings
    limits: LimitSettings = field(default_factory=LimitSettings)

    def __post_init__(self) -> None:
        if _WORD.fullmatch(self.federation) is None:
            raise ValueError(f"federation {self.federation!r} must be 1 to 32 lower-case letters, digits or '-'")
        if not self.public_url.startswith("https://"):
            raise ValueError(f"public_url {self.public_url!r} must begin with https://")
        if not 0 <= self.port <= 65535 or self.suite not in (1, 2):
            raise ValueError("port is 0 to 65535, suite is 1 or 2")


@dataclass(frozen=True)
class Home:
    """The coordinator's folder: where each file lies."""

    root: Path

    @property
    def config(self) -> Path:
        """Settings, TOML."""
        return self.root / "config.toml"

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.root / "store.sqlite"

    @property
    def blobs(self) -> Path:
        """Replies, states, broadcasts and bundles; each named by the store."""
        return self.root / "blobs"

    @property
    def jobs(self) -> Path:
        """Working folders of the aggregation worker."""
        return self.root / "jobs"

    @property
    def keys(self) -> Path:
        """Private keys, mode 0700."""
        return self.root / "keys"

    @property
    def sealing_ring(self) -> Path:
        """The sealing keys: the current one and those that still open messages."""
        return self.keys / "sealing.json"

    @property
    def signing(self) -> Path:
        """The signing key."""
        return self.keys / "signing.key"

    @property
    def signing_public(self) -> Path:
        """Its public half, which a root set lists."""
        return self.keys / "signing.pub"

    @property
    def next_signing(self) -> Path:
        """The signing key that waits for a root set to list it."""
        return self.keys / "next-signing.key"

    @property
    def next_public(self) -> Path:
        """Its public half."""
        return self.keys / "next-signing.pub"

    @property
    def tls(self) -> Path:
        """Certificate, its key, and the development CA's certificate."""
        return self.root / "tls"

    @property
    def socket(self) -> Path:
        """The administration socket, mode 0600, present while `serve` runs."""
        return self.root / "admin.sock"

    @property
    def lock(self) -> Path:
        """Held by whoever has the store open."""
        return self.root / "coordinator.lock"


def load_settings(home: Home) -> Settings:
    """Read and check `config.toml`.

    Raises:
        OperatorError: it is missing, no TOML, or a setting is unknown or out of bounds.
        StorageError: it cannot be read.
    """
    if not home.config.exists():
        raise OperatorError(f"{home.root} holds no coordinator; make one with: edgefl-coordinator init {home.root}")
    try:
        table = tomllib.loads(read_bounded(home.config, _MAX_CONFIG_BYTES).decode())
        return settings_from_table(table)
    except (ValueError, TypeError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise OperatorError(f"{home.config}: {error}") from error


def settings_from_table(table: Mapping[str, Any]) -> Settings:
    """Build settings from parsed TOML.

    Raises:
        ValueError: an unknown or missing key, a wrong type, or a value out of bounds.
    """
    plain = dict(table)
    task = dict(_table(plain.pop("task", None), "task"))
    task["classes"] = tuple(task.get("classes", ()))
    task["travels"] = tuple(task.get("travels", ()))
    task["backbone"] = _plain(_table(task.get("backbone"), "task.backbone"))
    task["settings"] = _plain(_table(task.get("settings", {}), "task.settings"))
    rounds = _table(plain.pop("rounds", None), "rounds")
    limits = _table(plain.pop("limits", {}), "limits")
    return _build(
        Settings,
        {
            **plain,
            "task": _build(TaskSettings, task, "task."),
            "rounds": _build(RoundSettings, rounds, "rounds."),
            "limits": _build(LimitSettings, limits, "limits."),
        },
        "",
    )


def settings_to_table(settings: Settings) -> dict[str, Any]:
    """Return the plain nested dict that TOML can hold; `settings_from_table` reads it back."""
    task = {**vars(settings.task), "classes": list(settings.task.classes), "travels": list(settings.task.travels)}
    task |= {"backbone": dict(settings.task.backbone), "settings": dict(settings.task.settings)}
    nested = {"task": task, "rounds": dict(vars(settings.rounds)), "limits": dict(vars(settings.limits))}
    return {**vars(settings), **nested}


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"the table [{name}] is missing")
    return value


def _plain(table: Mapping[str, Any]) -> Mapping[str, Plain]:
    return MappingProxyType({key: tuple(item) if isinstance(item, list) else item for key, item in table.items()})


def _build(kind: type[Settled], table: Mapping[str, Any], prefix: str) -> Settled:
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            raise ValueError(f"unknown setting {prefix}{name}; known: {', '.join(sorted(known))}")
    for name, item in known.items():
        if name not in table and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"the setting {prefix}{name} is missing")
        if name in table and item.type in (int, str, bool, float):
            _check_type(f"{prefix}{name}", table[name], item.type)
    return kind(**table)


def _check_type(name: str, value: object, kind: type) -> None:
    allowed: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {value!r}; {kind.__name__} is needed")
