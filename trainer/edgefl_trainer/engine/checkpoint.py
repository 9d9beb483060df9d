"""Durable progress of a run: every finished site of a phase, and every finished phase, survives a kill.

    checkpoints/latest.json                  which phase is finished and where each state lies; replaced atomically
    checkpoints/phase-0003/server.safetensors
    checkpoints/phase-0003/NAME.state.safetensors    a site's state after the phase
    checkpoints/phase-0003/NAME.accepted.safetensors    the same of a GPU site that does this phase again (`save_site`)
    checkpoints/phase-0003/NAME.reply.safetensors    its reply, kept until the phase is finished
    checkpoints/phase-0003/NAME.broadcast.safetensors    where rounds are chosen: what its model needs with the state
    checkpoints/phase-0003/encoder.safetensors    with `select = "tune"`: the best encoder of a method that learns one

Of a site no more than three phases stay: the last one and, where rounds are selected, its own best one so far and that
which is best for all sites together.

A state is named arrays plus plain values: safetensors with the values in the metadata. The line of metrics of a
finished site lies beside its reply, so a resumed run prints and logs what the undisturbed run would.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import State
from edgefl_trainer.engine.folder import make_folder
from edgefl_trainer.errors import RunError

MAX_STATE_BYTES = 4 * 1024**3
MAX_METRICS_BYTES = 16 * 1024**2  # of one site's line, which holds each of its epochs


@dataclass(frozen=True)
class Candidate:
    """A round whose model a site keeps, or whose encoder the run keeps, rather than those before it."""

    round: int
    figure: float  # on tune rows
    broadcast: Payload  # what the model needs beside the site's state; of an encoder its weights


@dataclass(frozen=True)
class Best:
    """The round whose model a site keeps so far, and the files that make it again."""

    round: int
    figure: float
    state: str  # empty: a site that took part in no round has none
    broadcast: str


@dataclass(frozen=True)
class SelectedRound:
    """A round that was chosen for a site, and all that its model is made of."""

    round: int
    state: State
    broadcast: Payload


@dataclass(frozen=True)
class BestEncoder:
    """The round whose encoder a run keeps so far, and the file that holds it."""

    round: int
    figure: float  # of its probe
    file: str


@dataclass(frozen=True)
class RunProgress:
    """How far a run is: `phases` finished, and the files of the states as they then were."""

    phases: int = 0
    server: str = ""
    sites: Mapping[str, str] = field(default_factory=dict)  # site → file
    best: Mapping[str, Best] = field(default_factory=dict)  # only where rounds are selected
    together: Mapping[str, Best] = field(default_factory=dict)  # the same, of one round for all sites
    encoder: BestEncoder | None = None  # the same, of a method that learns a backbone


@dataclass(frozen=True)
class SiteResult:
    """What one site left behind in one phase."""

    state: State
    reply: Payload
    metrics: Mapping[str, Any]  # a line of metrics.jsonl: figures by name, and `epochs`, a list of such


class Checkpoints:
    """The `checkpoints/` folder of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder)

    @staticmethod
    def sites_done(folder: Path, phase: int) -> int:
        """Count the sites of a phase whose work is kept; `folder` is the checkpoints', of which nothing is made."""
        return len(list((folder / f"phase-{phase:04d}").glob("*.metrics.json")))

    def progress(self) -> RunProgress:
        """Read `latest.json`; nothing is finished where there is none. A `RunError` where the file is not ours."""
        path = self._folder / "latest.json"
        if not path.exists():
            return RunProgress()
        try:
            found = json.loads(read_bounded(path, MAX_METRICS_BYTES))
            best, together = (
                {name: Best(**entry) for name, entry in found.get(key, {}).items()} for key in ("best", "together")
            )
            encoder = BestEncoder(**found["encoder"]) if found.get("encoder") else None
            sites = dict(found["sites"])
            return RunProgress(int(found["phases"]), str(found["server"]), sites, best, together, encoder)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path} is damaged ({error}): start the run anew in another folder.", "damaged") from error

    def states(self, names: Sequence[str], new: Mapping[str, State] | None = None) -> Mapping[str, State]:
        """Return the states of these sites: `new` ones, and those after the last phase, read when asked for."""
        files = self.progress().sites
        return KeptStates(self, {name: files.get(name) for name in names}, new or {})

    def check_states(self, names: Sequence[str]) -> None:
        """Read every state once and keep none: a `RunError` where one is missing or damaged, before any work."""
        for _ in self.states(names).values():
            pass

    def load_state(self, file: str) -> State:
        """Load a state by the file name that `RunProgress` holds; raises as `load_payload`."""
        payload = self.load_payload(file)
        return State(payload.arrays, payload.scalars)

    def load_payload(self, file: str) -> Payload:
        """Load a payload by the file name that `RunProgress` holds; a `RunError` where it is missing or damaged."""
        try:
            return Payload.from_bytes(read_bounded(self._folder / file, MAX_STATE_BYTES), MAX_STATE_BYTES)
        except EdgeflError as error:
            raise RunError(
                f"checkpoint {self._folder / file} cannot be read ({error}): put it back from a copy, "
                "or start the run anew in another folder.",
                "damaged",
            ) from error

    def load_site(self, phase: int, name: str) -> SiteResult | None:
        """Load a site's work of an unfinished phase; None where it has to be done (again), also as damaged."""
        folder = self._phase(phase)
        marker = folder / f"{name}.metrics.json"
        if not marker.exists():  # written last: state and reply are whole
            return None
        try:
            state = self.load_state(f"{folder.name}/{name}.state.safetensors")
            reply = read_bounded(folder / f"{name}.reply.safetensors", MAX_STATE_BYTES)
            metrics = dict(json.loads(read_bounded(marker, MAX_METRICS_BYTES)))
            return SiteResult(state, Payload.from_bytes(reply, MAX_STATE_BYTES), metrics)
        except (EdgeflError, ValueError, TypeError):
            return None  # the same work gives the same bits: nothing is lost but its time

    def save_site(self, phase: int, name: str, result: SiteResult) -> None:
        """Keep a site's work of a phase that goes on.

        A GPU site does a phase again where its coordinator was restored from a backup. Whether that will count is not
        known yet, so the state that `latest.json` names stays.
        """
        folder = self._phase(phase)
        make_folder(folder)
        if (folder / f"{name}.state.safetensors").exists():
            self._set_aside(folder, name)
        write_atomic(folder / f"{name}.state.safetensors", result.state.payload().to_bytes())
        write_atomic(folder / f"{name}.reply.safetensors", result.reply.to_bytes())
        write_atomic(folder / f"{name}.metrics.json", json.dumps(dict(result.metrics), sort_keys=True).encode())

    def drop_site(self, phase: int, name: str) -> None:
        """Forget a site's work of a phase that did not count; the state before it stays."""
        folder = self._phase(phase)
        (folder / f"{name}.metrics.json").unlink(missing_ok=True)  # first: without it the rest is no work
        counted = self.progress().sites.values()
        for file in (f"{name}.state.safetensors", f"{name}.reply.safetensors"):
            if f"{folder.name}/{file}" not in counted:
                (folder / file).unlink(missing_ok=True)

    def finish_phase(
        self,
        phase: int,
        server: State,
        sites: Mapping[str, SiteResult],
        better: Mapping[str, Candidate] | None = None,
        encoder: Candidate | None = None,
        together: Mapping[str, Candidate] | None = None,
    ) -> None:
        """Make a phase final: the server's state, then `latest.json`, then remove what nothing names any more.

        `better` are the sites, and `encoder` the weights, whose model or encoder is now the best one so far; `together`
        are all sites, where this round is now the best one for all.
        """
        folder = self._phase(phase)
        make_folder(folder)
        write_atomic(folder / "server.safetensors", server.payload().to_bytes())
        before = self.progress()
        files = {**before.sites, **{name: f"{folder.name}/{name}.state.safetensors" for name in sites}}
        best = {**before.best, **self._named(folder, files, better or {})}
        same = self._named(folder, files, together or {}) or before.together
        kept_encoder = before.encoder
        if encoder is not None:
            kept_encoder = BestEncoder(encoder.round, encoder.figure, f"{folder.name}/encoder.safetensors")
            write_atomic(self._folder / kept_encoder.file, encoder.broadcast.to_bytes())
        latest = RunProgress(phase + 1, f"{folder.name}/server.safetensors", files, best, same, kept_encoder)
        self._write_progress(latest)
        named = {file for entry in (*best.values(), *same.values()) for file in (entry.state, entry.broadcast)}
        named |= {kept_encoder.file} if kept_encoder else set()
        self._sweep({latest.server, *files.values(), *named})

    def _set_aside(self, folder: Path, name: str) -> None:
        """Keep a site's newest state under another name, where it lies in this folder."""
        latest, file = self.progress(), f"{folder.name}/{name}.state.safetensors"
        if latest.sites.get(name) == file:
            aside = f"{folder.name}/{name}.accepted.safetensors"
            write_atomic(self._folder / aside, read_bounded(self._folder / file, MAX_STATE_BYTES))
            self._write_progress(replace(latest, sites={**latest.sites, name: aside}))

    def _write_progress(self, latest: RunProgress) -> None:
        write_atomic(self._folder / "latest.json", json.dumps(asdict(latest), indent=2, sort_keys=True).encode())

    def _named(self, folder: Path, files: Mapping[str, str], chosen: Mapping[str, Candidate]) -> dict[str, Best]:
        """Write the broadcasts of chosen sites; return what names their models' files."""
        named = {}
        for name, found in chosen.items():
            kept = f"{folder.name}/{name}.broadcast.safetensors"
            write_atomic(self._folder / kept, found.broadcast.to_bytes())
            named[name] = Best(found.round, found.figure, files.get(name, ""), kept)
        return named

    def _phase(self, phase: int) -> Path:
        return self._folder / f"phase-{phase:04d}"

    def _sweep(self, kept: set[str]) -> None:
        for folder in self._folder.glob("phase-*"):
            for file in folder.iterdir():
                if f"{folder.name}/{file.name}" not in kept:
                    file.unlink()
            if not any(folder.iterdir()):
                shutil.rmtree(folder)


@dataclass(frozen=True, eq=False)
class KeptStates(Mapping[str, State]):
    """States that lie on the disk until they are asked for; that of a site that took no part yet is empty."""

    checkpoints: Checkpoints
    files: Mapping[str, str | None]  # of all sites, None where there is none yet
    new: Mapping[str, State]  # of some, which count instead

    def __getitem__(self, name: str) -> State:
        if name in self.new:
            return self.new[name]
        file = self.files[name]
        return State() if file is None else self.checkpoints.load_state(file)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True, eq=False)
class KeptRounds(Mapping[str, SelectedRound]):
    """Chosen rounds that lie on the disk until they are asked for."""

    checkpoints: Checkpoints
    best: Mapping[str, Best]

    def __getitem__(self, name: str) -> SelectedRound:
        entry = self.best[name]
        state = self.checkpoints.load_state(entry.state) if entry.state else State()
        return SelectedRound(entry.round, state, self.checkpoints.load_payload(entry.broadcast))

    def __iter__(self) -> Iterator[str]:
        return iter(self.best)

    def __len__(self) -> int:
        return len(self.best)
