"""One exchange of a live federation at this site, each step on the disk before the next.

    broadcast → the method's site half → state, reply and line of metrics in `checkpoints/`     learned
    reply → outbox → coordinator                                                               SiteMembership.meet
    accepted: state → `checkpoints/latest.json`, line → `metrics.jsonl`                        settled
    the round is over without it: both are dropped                                             settled

Guarantees: a kill at any moment loses at most a round of learning that was not finished; a finished one is neither
learned again nor sent under another key. A refused one stays while its round lasts, and is offered again. Where a reply
is not accepted, the site's state goes back to that of its newest accepted reply, as in the local engine. Exchanges are
numbered as the coordinator's rounds, from 1; one that was missed is skipped. Source: docs/security.md, reliability,
checks 56 and 57; docs/decisions/0030, 0077.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgefl_exchange.delivery import Delivery, settle
from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Scalar, State
from edgefl_trainer.engine.checkpoint import Checkpoints, SiteResult
from edgefl_trainer.engine.display import Display, RunPace
from edgefl_trainer.engine.folder import SUMMARY, read_metrics, write_metrics
from edgefl_trainer.engine.local_engine import InProcessSite, placed
from edgefl_trainer.engine.privacy.ledger import Ledgers
from edgefl_trainer.engine.selection import tune_judge
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.live.site_work import SiteWork


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of one site, kept in its run directory."""

    work: SiteWork  # what it learns
    folder: Path  # the run directory
    pace: RunPace  # how much of the run is done

    @property
    def name(self) -> str:
        """The site's name in its data."""
        return self.work.site.name

    @property
    def done(self) -> int:
        """Number of the last exchange whose reply was accepted; 0 before the first."""
        return self._checkpoints.progress().phases

    @property
    def state(self) -> State:
        """The site's state after it."""
        file = self._checkpoints.progress().sites.get(self.name)
        return self._checkpoints.load_state(file) if file else State()

    def learned(self, number: int, broadcast: Payload) -> SiteResult:
        """Do the site's share of an exchange, or read what was done before a kill.

        Raises:
            TrainingError: a loss, weight or map is not finite, or the broadcast is not of this exchange.
            StorageError: the disk is full.
        """
        found = self._checkpoints.load_site(number - 1, self.name)
        if found is not None:
            return found
        phase = self._phase(number, broadcast)
        runner = InProcessSite(self.work.method, self.work.site)
        with Display(self.pace, self.work.settings.epochs) as display:
            display.phase_started(phase, self.work.settings.rounds, [self.name])
            display.site_started(self.name)
            Ledgers(self.folder, self.work.method, self.work.settings.privacy_budget).charge(
                self.name, self.state, number - 1, phase, fresh=True
            )
            result = runner.local_round(self.state, broadcast, lambda facts: display.site_reported(self.name, facts))
            result = placed(result, number - 1, phase, self.name, broadcast)
            self._checkpoints.save_site(number - 1, self.name, result)
            display.site_finished(self.name, result.metrics)
        return result

    def settled(self, delivery: Delivery) -> None:
        """Take note of what became of a reply, before the outbox forgets it. Doing it twice changes nothing.

        A `StorageError` where the disk is full.
        """
        settle(delivery, self.count, self.drop)

    def drop(self, number: int) -> None:
        """Forget a reply that does not count."""
        self._checkpoints.drop_site(number - 1, self.name)

    def count(self, number: int) -> None:
        """Take a reply as accepted: its state is the site's from now on. Doing it twice changes nothing."""
        found = self._checkpoints.load_site(number - 1, self.name)
        if found is not None:
            # A coordinator restored from a backup does rounds again: what followed them here is over, as it is there.
            (self.folder / SUMMARY).unlink(missing_ok=True)
            lines = [line for line in read_metrics(self.folder) if int(line["phase_index"]) < number - 1]
            write_metrics(self.folder, [*lines, found.metrics])
            self._checkpoints.finish_phase(number - 1, State(), {self.name: found})

    def judged(self, broadcast: Payload) -> Mapping[str, Scalar]:
        """Score the site's model, as it is with this broadcast, on its tune rows, and add that to the last exchange.

        The broadcast is that of the exchange that follows, or the last hand-out. Gives the figure by name; nothing
        where there is no model, no tune row or no exchange yet.
        """
        lines = read_metrics(self.folder)
        if not lines or lines[-1]["phase"] == "warm" or int(lines[-1]["phase_index"]) != self.done - 1:
            return {}
        judge = tune_judge(self.work.method, {self.name: self.work.site})
        figures = judge(self.name, self.state, broadcast)
        if figures:
            write_metrics(self.folder, [*lines[:-1], {**lines[-1], **figures}])
        return figures

    def _phase(self, number: int, broadcast: Payload) -> Phase:
        """The method's phase of an exchange, which the broadcast has to name."""
        phases = self.work.method.phases(self.work.task.rounds)
        told = tuple(broadcast.scalars.get(name) for name in ("phase", "round", "rounds"))
        if number <= len(phases):
            phase = phases[number - 1]
            if told == (phase.kind, phase.round, self.work.task.rounds):
                return phase
        raise TrainingError(
            f"the broadcast of exchange {number} is of phase {told[0]}, round {told[1]} of {told[2]}, but this "
            f"version of {self.work.settings.method} expects another: update edgefl-derm, here or at the "
            "coordinator."
        )

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints")
