"""The local engine: runs every phase of a method over sites on this machine, resumable after each site.

Guarantees: the server sums in name order, so the same seed gives the same digest, whatever order the sites work in; a
run killed at any moment resumes to the digest of an undisturbed one, because every random draw depends on seed, site
and round only and every finished site is on disk before another takes its place. A phase holds the states of its own
sites alone: memory grows with those that take part, not with all.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgefl_protocol import Payload, state_digest
from edgefl_protocol.errors import PayloadError
from edgefl_trainer.contract import Arrays, Method, Phase, Scalar, Site, State, Task
from edgefl_trainer.engine.checkpoint import (
    BestEncoder,
    Candidate,
    Checkpoints,
    KeptRounds,
    SelectedRound,
    SiteResult,
)
from edgefl_trainer.engine.folder import read_metrics, write_metrics
from edgefl_trainer.engine.privacy.ledger import Ledgers
from edgefl_trainer.engine.selection import better_for_all, better_sites
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.learning.linear_probe import ProbeReport, choose_readout
from edgefl_trainer.method_halves import call_aggregate, call_broadcast, call_local_round, secret_numbering, stamped

WORK = {"images", "wait_seconds"}  # facts of a step that a site's line of metrics sums up


class SiteRunner(Protocol):
    """Anything that can do a site's share of a phase: in this process, or behind a network."""

    def local_round(
        self, state: State, broadcast: Payload, report: Callable[[Mapping[str, Scalar]], None]
    ) -> SiteResult:
        """Work on one broadcast."""


Given = Callable[[str], tuple[State, Payload]]  # what a site works on: its state and its broadcast, by its name


class SideBySide(Protocol):
    """Processes that do the sites' share of a phase side by side: results come in the order in which they are done."""

    def learn(self, names: Sequence[str], given: Given, observer: "RunObserver") -> Iterator[tuple[str, SiteResult]]:
        """Have each site work once; `given` is asked when a process is free."""

    def judge(self, names: Sequence[str], given: Given) -> Iterator[tuple[str, Mapping[str, Scalar]]]:
        """Have the current model of each site judged on its tune rows."""


class RunObserver(Protocol):
    """Who watches a run: a progress display, or nobody. Several sites may be under way at once."""

    def phases_kept(self, phases: Sequence[Phase], rounds: int) -> None:
        """Hear which phases an earlier process finished: they are not computed again."""

    def site_kept(self, site: str) -> None:
        """Hear that an earlier process finished this site in this phase."""

    def phase_started(self, phase: Phase, rounds: int, sites: Sequence[str]) -> None:
        """Hear that a phase begins with these sites."""

    def site_started(self, site: str) -> None:
        """Hear that a site begins."""

    def site_reported(self, site: str, facts: Mapping[str, Scalar]) -> None:
        """Hear of a training step, or another event inside a site."""

    def site_finished(self, site: str, metrics: Mapping[str, Any]) -> None:
        """Hear that a site is done and on disk."""

    def phase_judged(self, phase: Phase, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        """Hear how the sites' models score on tune rows after a phase."""

    def phase_probed(self, phase: Phase, probed: "Probed") -> None:
        """Hear what the encoder that is being learned is worth after a phase."""


@dataclass(frozen=True)
class InProcessSite:
    """A site of the local engine."""

    method: Method
    site: Site

    def local_round(
        self, state: State, broadcast: Payload, report: Callable[[Mapping[str, Scalar]], None]
    ) -> SiteResult:
        """Run the method's site half here; the reply carries the digest of the site's new state, the metrics stay.

        The line of metrics holds what the method summed up of its last epoch, and of each in order under `epochs`;
        `images` learned from, `images_per_second` and, where the method tells it, `wait_seconds` for data.

        Raises:
            TrainingError: a weight, map or other number of the new state or the reply is not finite.
        """
        started = time.perf_counter()
        epochs: list[Mapping[str, Scalar]] = []
        work: dict[str, float] = {}

        def listen(facts: Mapping[str, Scalar]) -> None:
            if "summary" in facts:
                epochs.append({name: value for name, value in facts.items() if name != "summary"})
            if "step" in facts:
                for name in WORK & facts.keys():
                    work[name] = work.get(name, 0) + float(facts[name])
            report(facts)

        try:
            new, reply = call_local_round(self.method, replace(self.site, report=listen), state, broadcast)
            checked = new.payload()
        except PayloadError as error:
            if error.code != "not_finite":
                raise
            raise TrainingError(
                f"site {self.site.name} diverged in round {broadcast.scalars['round']}, after its last step ({error}): "
                "lower the learning rate and name another --out; the rounds before are kept."
            ) from error
        state = State(checked.arrays, checked.scalars)  # read-only: it is not copied again to be kept
        signed = Payload(reply.arrays, {**reply.scalars, "site_sha256": state.digest()})
        last = {**epochs[-1], "epochs": epochs} if epochs else {}
        return SiteResult(state, signed, {**last, **_speed(work, time.perf_counter() - started)})


def _speed(work: Mapping[str, float], seconds: float) -> dict[str, float]:
    found: dict[str, float] = {"seconds": round(seconds, 3)}
    if "images" in work:
        found |= {"images": int(work["images"]), "images_per_second": round(work["images"] / max(seconds, 1e-9), 1)}
    if "wait_seconds" in work:
        found |= {"wait_seconds": round(work["wait_seconds"], 3)}
    return found


@dataclass(frozen=True)
class Probed:
    """What the encoder that is being learned is worth after a round: linear probes of its readouts."""

    round: int
    weights: Arrays  # by timm's names
    reports: Mapping[str, ProbeReport]  # by readout

    @property
    def readout(self) -> str:
        """The readout with the higher mean over sites."""
        return choose_readout(self.reports)

    @property
    def figure(self) -> float | None:
        """What rounds are compared by: the mean over sites of the better readout; None where no site has a figure."""
        return self.reports[self.readout].mean

    def line_of(self, site: str) -> dict[str, dict[str, float | None]]:
        """Return what a site's line of metrics tells of it: its own figures and the pooled ones, by readout."""
        own = {name: report.sites.get(site) for name, report in self.reports.items()}
        return {"probe": own, "probe_pooled": {name: report.pooled for name, report in self.reports.items()}}


@dataclass(frozen=True)
class SelectedEncoder:
    """The encoder of the best round by its probes."""

    round: int
    weights: Arrays  # by timm's names


@dataclass(frozen=True)
class FederationState:
    """A federation between two phases."""

    server: State
    sites: Mapping[str, State]
    selected: Mapping[str, SelectedRound] = field(default_factory=dict)  # of the sites that select
    together: Mapping[str, SelectedRound] = field(default_factory=dict)  # of all sites, where one round is for all
    encoder: SelectedEncoder | None = None  # of a method that learns a backbone, where rounds are selected

    def digest(self) -> str:
        """Compute `state_sha256` from the server's digest and each site's, in name order."""
        return state_digest(self.server.digest(), {name: state.digest() for name, state in self.sites.items()})


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """Runs a method over its sites and keeps the books in a run directory."""

    method: Method
    task: Task
    sites: Mapping[str, SiteRunner]
    folder: Path
    observer: RunObserver
    participation: float = 1.0
    judge: Callable[[str, State, Payload], Mapping[str, Scalar]] | None = None  # figures of a site's model on tune rows
    selecting: frozenset[str] = frozenset()  # sites that keep the model of their best round instead of the last
    selecting_together: bool = False  # keep the models of the round that is best for all sites, too
    probe: Callable[[Phase, State, Mapping[str, State]], Probed | None] | None = None  # of a learned encoder, if due
    selecting_encoder: bool = False  # keep the encoder of the round with the best probe
    ledgers: Ledgers | None = None  # of noised releases; None: nobody keeps any here
    crew: SideBySide | None = None  # who works side by side; None: this process, one site after the other
    numbering_key: bytes | None = None  # server's secret of peers' numbers, where sites are away; None: the seed's

    def run(self) -> FederationState:
        """Run what is left of all phases; returns the federation after the last one."""
        checkpoints = Checkpoints(self.folder / "checkpoints")
        progress = checkpoints.progress()
        names = sorted(self.sites)
        server = checkpoints.load_state(progress.server) if progress.server else self.method.start(self.task, names)
        checkpoints.check_states(names)
        # without the lines of a phase whose end a kill hid, so that none appears twice
        write_metrics(
            self.folder, [line for line in read_metrics(self.folder) if line["phase_index"] < progress.phases]
        )
        phases = list(self.method.phases(self.task.rounds))
        if progress.phases:
            self.observer.phases_kept(phases[: progress.phases], self.task.rounds)
        for index, phase in enumerate(phases[progress.phases :], progress.phases):
            results = self._phase(checkpoints, index, phase, server, checkpoints.states(names))
            server = call_aggregate(self.method, server, phase, {name: one.reply for name, one in results.items()})
            states = checkpoints.states(names, {name: result.state for name, result in results.items()})
            judged, broadcasts, figures = self._judged(phase, server, states, results)
            judged, encoder = self._probed(phase, server, states, judged, checkpoints.progress().encoder)
            new = [judged[name].metrics for name in sorted(judged)]
            write_metrics(self.folder, [*read_metrics(self.folder), *new])
            kept = checkpoints.progress()
            choosing = {name: figures[name] for name in self.selecting & results.keys() & figures.keys()}
            better = better_sites(phase, choosing, broadcasts, kept.best)
            together = better_for_all(phase, figures, broadcasts, kept.together) if self.selecting_together else {}
            checkpoints.finish_phase(index, server, results, better, encoder, together)
        return FederationState(server, checkpoints.states(names), *self._kept(checkpoints))

    def _kept(
        self, checkpoints: Checkpoints
    ) -> tuple[Mapping[str, SelectedRound], Mapping[str, SelectedRound], SelectedEncoder | None]:
        """The rounds that were selected, to be read back."""
        progress = checkpoints.progress()
        own, together = KeptRounds(checkpoints, progress.best), KeptRounds(checkpoints, progress.together)
        if progress.encoder is None:
            return own, together, None
        weights = checkpoints.load_payload(progress.encoder.file).arrays
        return own, together, SelectedEncoder(progress.encoder.round, weights)

    def _phase(
        self, checkpoints: Checkpoints, index: int, phase: Phase, server: State, states: Mapping[str, State]
    ) -> dict[str, SiteResult]:
        taking_part = participants(sorted(self.sites), self.participation, self.task.seed, phase)
        self.observer.phase_started(phase, self.task.rounds, taking_part)
        broadcasts = call_broadcast(self.method, server, phase, taking_part)
        results: dict[str, SiteResult] = {}
        for name in taking_part:
            if (done := checkpoints.load_site(index, name)) is not None:
                self.observer.site_started(name)
                self.observer.site_kept(name)
                results[name] = done
        sent: dict[str, Payload] = {}

        def given(name: str) -> tuple[State, Payload]:
            if self.ledgers is not None:
                self.ledgers.charge(name, states[name], index, phase)
            if self.numbering_key is None:
                numbering = np.random.default_rng([self.task.seed, phase.round])
            else:
                numbering = secret_numbering(self.numbering_key, name, index + 1)
            sent[name] = stamped(broadcasts[name], phase, self.task.rounds, numbering)
            return states[name], sent[name]

        left = [name for name in taking_part if name not in results]
        work = self.crew.learn(left, given, self.observer) if self.crew else self._one_by_one(left, given)
        for name, new in work:
            result = placed(new, index, phase, name, sent.pop(name), travels=bool(self.method.travels))
            checkpoints.save_site(index, name, result)
            self.observer.site_finished(name, result.metrics)
            results[name] = result
        return {name: results[name] for name in taking_part if name in results}

    def _one_by_one(self, names: Sequence[str], given: Given) -> Iterator[tuple[str, SiteResult]]:
        for name in names:
            self.observer.site_started(name)
            yield name, self.sites[name].local_round(*given(name), partial(self.observer.site_reported, name))

    def _judged(
        self, phase: Phase, server: State, states: Mapping[str, State], results: Mapping[str, SiteResult]
    ) -> tuple[dict[str, SiteResult], Mapping[str, Payload], Mapping[str, Mapping[str, Any]]]:
        """The results with the figures of the models as they are after the phase, what these used, and all figures.

        Judged are the sites that took part; all of them where one round is chosen for all.
        """
        if self.judge is None or phase.kind == "warm":
            return dict(results), {}, {}
        after = Phase("final", phase.round + 1)
        names = sorted(self.sites if self.selecting_together else results)
        found = call_broadcast(self.method, server, after, names)
        broadcasts = {name: stamped(found[name], after, self.task.rounds) for name in names}
        given = {name: (states[name], broadcasts[name]) for name in names}
        if self.crew is not None:
            figures = dict(self.crew.judge(list(given), given.__getitem__))
        else:
            figures = {name: self.judge(name, *given[name]) for name in given}
        judged = {name: replace(one, metrics={**one.metrics, **figures[name]}) for name, one in results.items()}
        self.observer.phase_judged(phase, {name: result.metrics for name, result in judged.items()})
        return judged, broadcasts, figures

    def _probed(
        self,
        phase: Phase,
        server: State,
        states: Mapping[str, State],
        results: Mapping[str, SiteResult],
        best: BestEncoder | None,
    ) -> tuple[dict[str, SiteResult], Candidate | None]:
        """The results with the figures of a probe, where one is due, and the encoder if it is the best one so far."""
        probed = self.probe(phase, server, states) if self.probe else None
        if probed is None:
            return dict(results), None
        self.observer.phase_probed(phase, probed)
        told = {
            name: replace(result, metrics={**result.metrics, **probed.line_of(name)})
            for name, result in results.items()
        }
        figure = probed.figure
        if not self.selecting_encoder or figure is None or (best is not None and figure < best.figure):
            return told, None  # ties go to the later round
        return told, Candidate(phase.round, figure, Payload(probed.weights, {}))


def placed(
    result: SiteResult, index: int, phase: Phase, site: str, broadcast: Payload, *, travels: bool = True
) -> SiteResult:
    """Add to a result's line of metrics where in the run it stands and how many bytes went either way.

    Args:
        travels: False for a method whose sites send nothing: what stands in its payloads is the engine's own.
    """
    where = {"phase_index": index, "phase": phase.kind, "round": phase.round, "site": site}
    sizes = {
        "bytes_up": result.reply.encoded_bytes() if travels else 0,
        "bytes_down": broadcast.encoded_bytes() if travels else 0,
    }
    return replace(result, metrics={**where, **sizes, **result.metrics})


def participants(names: Sequence[str], share: float, seed: int, phase: Phase) -> list[str]:
    """Choose a phase's sites, in name order: a seeded share in `train` and sampled phases, at least one; else all."""
    if share >= 1 or not (phase.kind == "train" or phase.sampled):
        return sorted(names)
    count = max(1, math.floor(share * len(names) + 0.5))  # a half counts up: 5 % of 90 sites are 5
    rng = np.random.default_rng([seed, phase.round])
    return sorted(rng.choice(sorted(names), size=count, replace=False).tolist())
