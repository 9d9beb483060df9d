"""The privacy ledger: each noised release of a site, on the disk before it is made, and a budget that refuses the next.

    DIR/privacy/SITE.json    delta, and of each release its name and noise multiplier; replaced atomically

Guarantees: a release is in the ledger before its noise is drawn, so what left is never missing, even after a kill; a
release that a resumed run draws again from the same seed is the same and is counted once, one under fresh noise anew;
past the budget nothing is drawn; a ledger that tells less than the site itself has counted is refused. A site's ledger
is its own: it needs no other site and no server. Source: docs/security.md 7, check 52; docs/decisions/0066.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Method, Phase, State
from edgefl_trainer.engine.folder import STOPPED, make_folder
from edgefl_trainer.engine.privacy.releases import release_of, releases_of
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import BudgetError, RunError, SettingError
from edgefl_trainer.gaussian_noise import NoisyRelease, epsilon_of, told_epsilon

LEDGERS: Final = "privacy"  # folder in that of the run
MAX_LEDGER_BYTES: Final = 16 << 20  # 100,000 releases and more
SAME: Final = 1e-6  # relative difference of two accounts that are one: libraries of two versions sum otherwise


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

    def check(self, own: float, delta: float, *, fresh: bool, but: str = "") -> float:
        """Compute what all releases have cost, and refuse a ledger that contradicts what the site itself has counted.

        Args:
            own: epsilon that the site has counted.
            fresh: as of `charge`: then the ledger may tell of more, of replies that were drawn and did not count.
            but: name of a release that the site cannot have counted yet.

        A `RunError` where the two differ, or the ledger is damaged.
        """
        found = _cost(tuple(one for one in self.entries() if fresh or one.name != but), delta)
        if own and not self.path.exists():
            raise RunError(
                f"site {self.site} has counted epsilon {told_epsilon(own)}, but its privacy ledger {self.path} is not "
                "there: put it back from a copy, or begin anew with another --out.",
                "damaged",
            )
        if found < own * (1 - SAME) or (not fresh and found > own * (1 + SAME)):
            raise RunError(
                f"the privacy ledger {self.path} tells epsilon {told_epsilon(found)}, but site {self.site} has counted "
                f"{told_epsilon(own)} by itself: one of them was changed. Put the ledger back from a copy, or begin "
                "anew with another --out.",
                "damaged",
            )
        return found

    def charge(self, name: str, release: NoisyRelease, *, fresh: bool) -> None:
        """Write a release down, before it is made.

        Args:
            fresh: its noise is drawn anew each time, so a second one of this name is another release.

        Raises:
            BudgetError: it would cost more than the budget; a simulated run cannot go on, which its folder tells from
                then on.
            RunError: the ledger is damaged.
            StorageError: it cannot be written.
        """
        entries = self.entries()
        if not fresh and any(one.name == name for one in entries):
            return
        after = (*entries, NoisedReply(name, release.multiplier))
        if self.budget and (cost := _cost(after, release.delta)) > self.budget:
            spent = told_epsilon(_cost(entries, release.delta))
            why = (
                f"site {self.site} has spent epsilon {spent} of its privacy budget of {self.budget:.12g} in "
                f"{counted(len(entries), 'release')}, and another would make it {told_epsilon(cost)} (delta "
                f"{release.delta:g}): nothing more leaves it in this run"
            )
            if fresh:  # a member of a live federation still fetches what that ends with
                raise BudgetError(f"{why}.")
            make_folder(self.path.parent)
            write_atomic(self.folder / STOPPED, f"{why}, which cannot go on.\n".encode())
            raise BudgetError(f"{why}, which cannot go on.")
        make_folder(self.path.parent)
        told = {"delta": release.delta, "releases": [vars(one) for one in after]}
        write_atomic(self.path, json.dumps(told, indent=1).encode())


@dataclass(frozen=True)
class Ledgers:
    """The ledgers of a run, and what its method releases."""

    folder: Path
    method: Method
    budget: float = 0.0

    def charge(self, site: str, state: State, index: int, phase: Phase, *, fresh: bool = False) -> None:
        """Write down what a site is about to send in a phase, if that is noised.

        Args:
            state: the site's, with what it has counted so far.
            index: of the phase in the run, from 0.

        Raises as `PrivacyLedger.check` and `PrivacyLedger.charge`.
        """
        release = release_of(self.method, phase)
        if release is not None:
            ledger, name = PrivacyLedger(self.folder, site, self.budget), f"phase-{index:04d}"
            ledger.check(counted_by(state), release.delta, fresh=fresh, but=name)
            ledger.charge(name, release, fresh=fresh)


def counted_by(state: State) -> float:
    """Return the epsilon that a site has counted by itself."""
    return float(state.values.get("epsilon_spent", 0.0))


def check_spendable(settings: RunSettings, method: Method, remedy: str) -> None:
    """Refuse, by a `SettingError`, a budget that nothing spends; `remedy` says how something would."""
    if settings.privacy_budget and not releases_of(method, settings.rounds):
        raise SettingError(
            f"{settings.method} sends nothing under Gaussian noise with these settings, so a privacy budget bounds "
            f"nothing: leave --privacy-budget out, or {remedy}."
        )


def check_budget(settings: RunSettings, method: Method) -> None:
    """Refuse, by a `SettingError`, a budget that nothing spends, or that does not last for the rounds."""
    check_spendable(settings, method, "set dp_noise of a method that has it (edgefl-train methods NAME)")
    if not settings.privacy_budget:
        return
    found = releases_of(method, settings.rounds)
    delta = found[0].delta
    cost = _cost(found, delta)
    if settings.participation == 1 and cost > settings.privacy_budget:
        before = len(found) - settings.rounds
        which = f" ({before} before the first round, 1 in each round)" if before else ""
        lasts = _cost(releases_of(method, 1), delta) <= settings.privacy_budget
        raise SettingError(
            f"{counted(len(found), 'release')} of each site{which} cost epsilon {told_epsilon(cost)} at delta "
            f"{delta:g}, and the privacy budget is {settings.privacy_budget:.12g}: give "
            f"{'fewer rounds, ' if lasts else ''}a larger dp_noise, or a larger --privacy-budget."
        )


def _cost(entries: tuple[NoisedReply | NoisyRelease, ...], delta: float) -> float:
    return epsilon_of(Counter(one.multiplier for one in entries), delta)
