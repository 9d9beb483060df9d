"""Progress of a run on stderr: a bar that moves in a terminal, a line for each site elsewhere (logs, cron)."""

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from edgefl_trainer.contract import Phase, Scalar


def warn(text: str) -> None:
    """Print what a person should know where no bar moves."""
    click.echo(f"warning: {text}", err=True)


class Display:
    """Shows phase, site, loss, images per second and the time left."""

    def __init__(self, phases: int, sites: int) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._total = self._bar.add_task("starting", total=phases * sites, facts="")
        self._phase = ""
        self._images = 0
        self._since = monotonic()

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase_started(self, phase: Phase, rounds: int, sites: Sequence[str]) -> None:
        """Name the phase."""
        self._phase = f"round {phase.round}/{rounds}" if phase.kind == "train" else phase.kind

    def warn(self, text: str) -> None:
        """Print what a person should know."""
        self._say(f"warning: {text}")

    def site_started(self, site: str) -> None:
        """Name the site."""
        self._images, self._since = 0, monotonic()
        self._bar.update(self._total, description=f"{self._phase} · {site}", facts="")

    def site_reported(self, site: str, facts: Mapping[str, Scalar]) -> None:
        """Show loss and speed, and print what a person should look at."""
        if "warning" in facts:
            self.warn(str(facts["warning"]))
        if "step" not in facts:
            return
        self._images += int(facts.get("images", 0))
        speed = self._images / max(1e-9, monotonic() - self._since)
        self._bar.update(
            self._total, facts=f"epoch {facts.get('epoch')} · loss {facts.get('loss'):.4g} · {speed:.0f} images/s"
        )

    def site_finished(self, site: str, metrics: Mapping[str, Any]) -> None:
        """Move the bar, or print a line where nothing can move."""
        self._bar.advance(self._total)
        if not self._console.is_terminal and metrics["phase"] == "train":
            shown = {name: metrics[name] for name in ("loss", "seconds") if name in metrics}
            facts = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, int | float))
            self._say(f"{self._phase} · {site}: {facts}")

    def phase_judged(self, phase: Phase, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        """Print where the federation stands."""
        figures = [found.get("tune_balanced_accuracy") for found in metrics.values()]
        known = [figure for figure in figures if isinstance(figure, float)]
        if known:
            mean = sum(known) / len(known)
            self._say(f"{self._phase}: tune balanced accuracy {mean:.1%}, mean of {len(known)} sites")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
