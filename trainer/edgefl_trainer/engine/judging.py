"""Judging at the end of a run: how much work it is, and a line for each site with the time left.

A run judges every `tune` and every reported row of each site, however few it learned from. So this may take longer than
learning, and the time left that a run tells counts it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from edgefl_protocol.sentences import duration
from edgefl_trainer.contract import Site
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.display import tell

TUNE_PASSES = 2  # over the tune rows: one finds the temperature, one the threshold of referral
PASS = 1 / 3  # of the work of learning from a picture once, which also goes back through the network


@dataclass(frozen=True)
class JudgedSite:
    """How many rows of a site are judged."""

    tune: int
    reported: int

    @property
    def passes(self) -> int:
        """Count the rows that the network reads."""
        return TUNE_PASSES * self.tune + self.reported


def judged_sites(
    federation: Federation, sites: Mapping[str, Site], held_out: Mapping[str, Site]
) -> dict[str, JudgedSite]:
    """Count the rows of each site, those that trained first; a site that is held out has no tune rows to look at."""
    split = federation.report_split
    reported = {name: len(federation.sites[name].rows(split)) for name in (*sorted(sites), *sorted(held_out))}
    return {name: JudgedSite(len(sites[name].tune) if name in sites else 0, count) for name, count in reported.items()}


def epochs_of_work(sites: Mapping[str, JudgedSite], epochs: int) -> float:
    """Return the work of judging in pictures that are learned from for a round of so many epochs."""
    return PASS * sum(site.passes for site in sites.values()) / max(1, epochs)


class Judging:
    """Tells which site is judged, and how long all of it will still take."""

    def __init__(
        self,
        sites: Mapping[str, JudgedSite],
        split: str,
        rows: str = "pictures",
        say: Callable[[str], None] = tell,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Nothing is judged yet; `split` names the reported rows, `rows` what a row is."""
        self._sites, self._split, self._rows, self._say, self._clock = sites, split, rows, say, clock
        self._begun, self._done, self._now = clock(), 0, 0

    def site(self, name: str) -> None:
        """Say that a site begins; with the time left, once another one is done."""
        site = self._sites[name]
        self._done, self._now = self._done + self._now, site.passes
        counts = [f"{site.reported:,} {self._split}", *([f"{site.tune:,} tune"] if site.tune else [])]
        left = ""
        if self._done:
            rest = sum(one.passes for one in self._sites.values()) - self._done
            left = f", {duration((self._clock() - self._begun) * rest / self._done)} left"
        self._say(f"judging {name}: {' and '.join(counts)} {self._rows}{left}")


def judging_of(federation: Federation, sites: Mapping[str, Site], held_out: Mapping[str, Site]) -> Judging:
    """Begin to judge the sites of a federation."""
    rows = "pictures" if federation.questions is None else "questions"
    return Judging(judged_sites(federation, sites, held_out), federation.report_split, rows)
