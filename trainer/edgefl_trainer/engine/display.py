"""Progress of a run on stderr: two lines that change in a terminal, a line for each site elsewhere (logs, cron).

Both say phase, site, loss, images per second, the share of time spent waiting for data, and the time left; in 80
columns nothing of it is cut. Sites differ in size, so what is left is counted in images and not in sites, and only work
of this process tells its pace: a run that goes on after a stop does not take finished rounds and sites for quick ones.

A run then judges every `tune` and every reported row of each site, however few it learned from. This may take longer
than learning, so the time left counts it, and a line names each site that is judged.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from edgefl_protocol.sentences import counted, duration
from edgefl_trainer.contract import Phase, Scalar, Site
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.local_engine import Probed
from edgefl_trainer.engine.selection import RIGHT, judged_figure
from edgefl_trainer.evaluate.one_class import beside, mean_of

BAR_WIDTH = 20  # columns
SHORT_PHASE = 0.1  # work of a warm or final phase, as a share of a round's
TUNE_PASSES = 2  # of judging over the tune rows: one finds the temperature, one the threshold of referral
PASS = 1 / 3  # of the work of learning from a picture once, which also goes back through the network


def warn(text: str) -> None:
    """Print what a person should know where no bar moves."""
    click.echo(f"warning: {text}", err=True)


def tell(text: str) -> None:
    """Print what a person wants to know where no bar moves."""
    click.echo(text, err=True)


class RunPace:
    """How much of a run is done, in images, and from that the time left."""

    def __init__(
        self,
        phases: Sequence[Phase],
        images: Mapping[str, int],
        participation: float = 1.0,
        clock: Callable[[], float] = monotonic,
        after: float = 0.0,
        judged: float = 0.0,
        judges_all: bool = False,
    ) -> None:
        """Count the work: images that each site learns from in an epoch, and the share of sites in each round.

        Judging is work, too: `judged` follows each phase but a warm one, `after` the last. With `judges_all` a round
        judges all sites, else those that took part.
        """
        self._after = after
        self._phases, self._images, self._clock = list(phases), images, clock
        everyone = sum(images.values())
        self._learned = [everyone * (participation if one.kind == "train" else SHORT_PHASE) for one in phases]
        share = 1.0 if judges_all else participation
        looked = [judged * (share if one.kind == "train" else one.kind != "warm") for one in phases]
        self._sizes = [sum(work) for work in zip(self._learned, looked, strict=True)]
        self.total = max(sum(self._sizes), 1.0)
        self.done = 0.0
        self._trained = 0  # train phases begun by this process
        self._begun: tuple[float, float] | None = None  # clock and work where this process took over
        # work before this phase and with it, and of this phase for each image
        self._base = self._end = self._share = 0.0
        self._parts: dict[str, float] = {}  # of each site of this phase, how much of its work is done

    def phase(self, phase: Phase, sites: Sequence[str]) -> None:
        """Note that a phase begins with these sites."""
        index = self._phases.index(phase)
        self.done = self._base = sum(self._sizes[:index])
        self._parts = {}
        self._end = self._base + self._sizes[index]
        self._share = self._learned[index] / max(1, sum(self._images[name] for name in sites))
        if self._begun is None or (phase.kind == "train" and self._trained == 1):  # the first round prepares, too
            self._begun = self._clock(), self.done
        self._trained += phase.kind == "train"

    def within(self, site: str, share: float) -> None:
        """Note that part of a site's work is done."""
        self._parts[site] = share
        self.done = self._base + self._share * sum(part * self._images[name] for name, part in self._parts.items())

    def kept(self, site: str) -> None:
        """Note that an earlier process did a site's work: it tells nothing of the pace of this one."""
        self.within(site, 1.0)
        if self._begun is not None:
            clock, work = self._begun
            self._begun = clock, work + self._share * self._images[site]

    def judged(self) -> None:
        """Note that the phase is judged, which ends it."""
        self.done = self._end

    def left_seconds(self) -> float | None:
        """Estimate the seconds to the end of the run; None before anything was done here."""
        if self._begun is None or self.done <= self._begun[1]:
            return None
        left = self.total + self._after - self.done
        return (self._clock() - self._begun[0]) * left / (self.done - self._begun[1])


def _mean_line(figures: Mapping[str, float], one_class: Collection[str]) -> str:
    """The mean over sites, and beside it that without sites of one class, whose figure says nothing."""
    mean, _ = mean_of(figures.values())
    shown = f"{mean:.1%}, mean of {counted(len(figures), 'site')}"
    if not figures.keys() & set(one_class):
        return shown
    several, number = mean_of(figure for name, figure in figures.items() if name not in one_class)
    return f"{shown}; {beside(f'{several:.1%}' if number else '', number)}"


class _Work:
    """What a site that is under way has said of its steps."""

    def __init__(self) -> None:
        self.images, self.waited, self.tells_waiting, self.since = 0, 0.0, False, monotonic()

    def hear(self, facts: Mapping[str, Scalar]) -> None:
        self.images += int(facts.get("images", 0))
        self.waited += float(facts.get("wait_seconds", 0))
        self.tells_waiting |= "wait_seconds" in facts

    def speed(self) -> list[str]:
        seconds = max(1e-9, monotonic() - self.since)
        found = [f"{self.images / seconds:.0f} images/s"] if self.images else []
        if self.tells_waiting:
            found.append(f"waiting for data {min(1.0, self.waited / seconds):.0%}")
        return found


class Display:
    """Shows phase, site, loss, images per second, waiting and the time left."""

    def __init__(self, pace: RunPace, epochs: int, one_class: Collection[str] = ()) -> None:
        """Nothing is shown yet; `one_class` are the sites whose train or tune rows hold one class."""
        self._one_class = one_class
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(BAR_WIDTH),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._facts = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._facts), console=self._console)
        self._pace, self._epochs = pace, epochs
        self._total = self._bar.add_task("starting", total=pace.total, left="")
        self._phase = ""
        self._under_way: dict[str, _Work] = {}

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def phases_kept(self, phases: Sequence[Phase], rounds: int) -> None:
        """Print what is taken from an earlier process."""
        trained = [phase.round for phase in phases if phase.kind == "train"]
        several = f"rounds 1 to {trained[-1]} of {rounds} are" if len(trained) > 1 else f"round 1 of {rounds} is"
        what = several if trained else f"the {phases[-1].kind} phase is"
        self._say(f"{what} taken from the run's checkpoints, not computed again")

    def site_kept(self, site: str) -> None:
        """Move the bar over a site that an earlier process finished, and say so."""
        self._pace.kept(site)
        self._done(site)
        self._say(f"{self._phase} · {site}: taken from the run's checkpoints, not computed again")

    def phase_started(self, phase: Phase, rounds: int, sites: Sequence[str]) -> None:
        """Name the phase."""
        self._phase = f"round {phase.round}/{rounds}" if phase.kind == "train" else phase.kind
        self._pace.phase(phase, sites)

    def warn(self, text: str) -> None:
        """Print what a person should know."""
        self._say(f"warning: {text}")

    def site_started(self, site: str) -> None:
        """Name the site, or say how many are under way at once."""
        self._under_way[site] = _Work()
        self._facts.plain = ""
        self._describe()

    def site_reported(self, site: str, facts: Mapping[str, Scalar]) -> None:
        """Show loss and speed, and print what a person should look at."""
        if "warning" in facts:
            self.warn(str(facts["warning"]))
        if "step" not in facts:
            return
        work = self._under_way[site]
        work.hear(facts)
        epoch, step, steps = (float(facts.get(name, 1)) for name in ("epoch", "step", "steps"))
        self._pace.within(site, min(1.0, (epoch - 1 + step / max(1.0, steps)) / self._epochs))
        named = [site] if len(self._under_way) > 1 else []
        shown = [*named, f"epoch {epoch:.0f}", f"loss {facts.get('loss'):.4g}", *work.speed()]
        self._facts.plain = " · ".join(shown)
        self._bar.update(self._total, completed=self._pace.done, left=self._left())

    def site_finished(self, site: str, metrics: Mapping[str, Any]) -> None:
        """Move the bar, or print a line where nothing can move."""
        work = self._done(site)
        if self._console.is_terminal or metrics["phase"] != "train":
            return
        shown = [f"{name} {metrics[name]:.4g}" for name in ("loss", "seconds") if isinstance(metrics.get(name), float)]
        left = [text] if (text := self._left()) else []
        self._say(f"{self._phase} · {site}: {', '.join([*shown, *work.speed(), *left])}")

    def phase_judged(self, phase: Phase, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        """Print where the federation stands."""
        self._pace.judged()
        self._bar.update(self._total, completed=self._pace.done)
        what = "accuracy" if any(RIGHT in found for found in metrics.values()) else "balanced accuracy"
        figures = {name: judged_figure(found) for name, found in metrics.items()}
        known = {name: figure for name, figure in figures.items() if isinstance(figure, float)}
        if known:
            self._say(f"{self._phase}: tune {what} {_mean_line(known, self._one_class)}")

    def phase_probed(self, phase: Phase, probed: Probed) -> None:
        """Print what the encoder's features are worth."""
        report = probed.reports[probed.readout]
        figures = {name: figure for name, figure in report.sites.items() if figure is not None}
        parts = [_mean_line(figures, report.one_class)] if figures else []
        parts += [f"{report.pooled:.1%} pooled"] if report.pooled is not None else []
        if parts:
            self._say(f"{self._phase}: linear probe {'; '.join(parts)} (balanced accuracy, readout {probed.readout})")

    def _done(self, site: str) -> _Work:
        """Move the bar over a site, and say what is still under way."""
        self._pace.within(site, 1.0)
        self._bar.update(self._total, completed=self._pace.done)
        work = self._under_way.pop(site)
        if self._under_way:
            self._describe()
        return work

    def _describe(self) -> None:
        names = list(self._under_way)
        what = names[0] if len(names) == 1 else counted(len(names), "site")
        self._bar.update(self._total, description=f"{self._phase} · {what}")

    def _left(self) -> str:
        left = duration(self._pace.left_seconds())
        return f"{left} left" if left else ""

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


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
