"""The privacy ledger: each noised release of a site, on the disk before it is made, and a budget that refuses the next.

    DIR/privacy/SITE.json    delta, and of each release its name and noise multiplier; replaced atomically

Guarantees: a release is in the ledger before its noise is drawn, so what left is never missing, even after a kill; a
release that a resumed run draws again from the same seed is the same and is counted once, one under fresh noise anew;
past the budget nothing is drawn. A site's ledger is its own: it needs no other site and no server. Source:
docs/security.md 7, check 52; docs/decisions/0066.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Method, Phase, declared
from edgefl_trainer.engine.folder import make_folder
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import BudgetError, RunError, SettingError
from edgefl_trainer.gaussian_noise import NoisyRelease, epsilon_of

LEDGERS: Final = "privacy"  # folder in that of the run
MAX_LEDGER_BYTES: Final = 16 << 20  # 100,000 releases and more


@dataclass(frozen=True)
class NoisedReply:
    """One release."""

    name: str  # of the exchange
    multiplier: float


@dataclass(frozen=True)
class PrivacyLedger:
    """What one site has released under noise."""

    folder: Path  # of the run
    site: str
    budget: float = 0.0  # most epsilon; 0: no bound

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder / LEDGERS / f"{self.site}.json"

    def entries(self) -> tuple[NoisedReply, ...]:
        """Read the releases, in order; a `RunError` where the file is damaged."""
        if not self.path.exists():
            return ()
        try:
            found = json.loads(read_bounded(self.path, MAX_LEDGER_BYTES))
            return tuple(NoisedReply(str(one["name"]), float(one["multiplier"])) for one in found["releases"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"the privacy ledger {self.path} is damaged ({error}): put it back from a copy; without it nobody "
                "knows what was released.",
                "damaged",
            ) from error

    def epsilon(self, delta: float) -> float:
        """Compute what all releases have cost."""
        return _cost(self.entries(), delta)

    def charge(self, name: str, release: NoisyRelease, *, fresh: bool) -> None:
        """Write a release down, before it is made.

        Args:
            fresh: its noise is drawn anew each time, so a second one of this name is another release.

        Raises:
            BudgetError: it would cost more than the budget.
            RunError: the ledger is damaged.
            StorageError: it cannot be written.
        """
        entries = self.entries()
        if not fresh and any(one.name == name for one in entries):
            return
        after = (*entries, NoisedReply(name, release.multiplier))
        if self.budget and (cost := _cost(after, release.delta)) > self.budget:
            raise BudgetError(
                f"site {self.site} has spent epsilon {_cost(entries, release.delta):.3g} of its privacy budget of "
                f"{self.budget:g} in {counted(len(entries), 'release')}, and another would make it {cost:.3g} (delta "
                f"{release.delta:g}): nothing more leaves it in this run."
            )
        make_folder(self.path.parent)
        told = {"delta": release.delta, "releases": [vars(one) for one in after]}
        write_atomic(self.path, json.dumps(told, indent=1).encode())


@dataclass(frozen=True)
class Ledgers:
    """The ledgers of a run, and what its method releases."""

    folder: Path
    method: Method
    budget: float = 0.0

    def charge(self, site: str, index: int, phase: Phase, *, fresh: bool = False) -> None:
        """Write down what a site is about to send in a phase, if that is noised; raises as `PrivacyLedger.charge`.

        Args:
            index: of the phase in the run, from 0.
        """
        release = release_of(self.method, phase)
        if release is not None:
            PrivacyLedger(self.folder, site, self.budget).charge(f"phase-{index:04d}", release, fresh=fresh)


def release_of(method: Method, phase: Phase) -> NoisyRelease | None:
    """Return the noise on what a method's sites send in a phase; None where there is none that can be accounted."""
    told = declared(method).release
    return told(method, phase) if told else None


def check_budget(settings: RunSettings, method: Method) -> None:
    """Refuse, by a `SettingError`, a budget that nothing spends, or that does not last for the rounds."""
    if not settings.privacy_budget:
        return
    found = [one for phase in method.phases(settings.rounds) if (one := release_of(method, phase)) is not None]
    if not found:
        raise SettingError(
            f"{settings.method} sends nothing under Gaussian noise with these settings, so a privacy budget bounds "
            "nothing: leave --privacy-budget out, or set dp_noise of a method that has it (edgefl-train methods NAME)."
        )
    cost = epsilon_of(Counter(one.multiplier for one in found), found[0].delta)
    if settings.participation == 1 and cost > settings.privacy_budget:
        raise SettingError(
            f"{counted(len(found), 'release')} of each site cost epsilon {cost:.3g} at delta {found[0].delta:g}, and "
            f"the privacy budget is {settings.privacy_budget:g}: give fewer rounds, a larger dp_noise, or a larger "
            "--privacy-budget."
        )


def _cost(entries: tuple[NoisedReply, ...], delta: float) -> float:
    return epsilon_of(Counter(one.multiplier for one in entries), delta)
