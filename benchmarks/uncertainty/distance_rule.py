"""What a rule of distance would add to the rules of `edgefl score`: of the pictures that pass all of these, how many
are unlike the pictures that a run learned from (d² of docs/methods.md 1.8 above 1: 5 % of pictures like them are).
Pictures are judged as they are: what is referred only when it is turned (`unsteady`) passes here.

Counted over all sites of all RUNs: reported rows of benign classes and of those that ask for a look, rows of diagnoses
that a run did not learn (of any split), and pictures that are not of the task.

    python -m benchmarks.uncertainty.distance_rule runs/three-s* --foreign textures --foreign skin --foreign vqa_rad.zip
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.uncertainty.uncertainty import seed_of_run
from benchmarks.uncertainty.uncertainty_measures import Said, said_by
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.class_info import known_among, suspicious_classes
from edgefl_protocol.pictures.quality import measure_quality
from edgefl_protocol.pictures.referral import Measures, ReferralRules, judge_picture, refer_reasons
from edgefl_trainer.data.sources.foreign import read_foreign
from edgefl_trainer.engine.judging.prediction import referral_rules_of
from edgefl_trainer.engine.models import FinishedRun, open_run

FAR = 1.0  # d² beyond which a picture is unlike the training pictures


@dataclass
class Passed:
    """Pictures of one kind: all, those that every rule lets pass, and of these those that are far."""

    pictures: int = 0
    passed: int = 0
    far: int = 0

    def add(self, passed: NDArray[np.bool_], distance: NDArray[np.float64]) -> None:
        """Count some more."""
        self.pictures += len(passed)
        self.passed += int(passed.sum())
        self.far += int((passed & (distance > FAR)).sum())


def passes(
    said: Said, pictures: NDArray[np.uint8], seen: Sequence[bool], rules: ReferralRules, least_px: int
) -> NDArray[np.bool_]:
    """Tell of each picture whether `edgefl score` would name no reason to refer it as it is."""
    found = []
    for number, pixels in enumerate(pictures):
        probabilities = said.probabilities[number].astype(np.float32)
        measures = Measures(
            probabilities=probabilities,
            vacuity=float(said.measures["vacuity"][number]),
            dissonance=float(said.measures["dissonance"][number]),
            entropy_nats=float(said.measures["entropy"][number]),
        )
        picture = judge_picture(measure_quality(pixels, "none"), least_px, rules)
        found.append(not refer_reasons(measures, seen, rules, picture=picture, expired=None))
    return np.array(found, dtype=bool)


def count(run: FinishedRun, foreign: Mapping[str, NDArray[np.uint8]], kinds: Mapping[str, Passed]) -> None:
    """Add what a run's sites let pass."""
    if run.settings.colour != "none":
        raise EdgeflError("the pictures are judged as they are: name a run with --colour none", "run")
    seed = seed_of_run(run, foreign)
    own, whole, learned = seed.study.own, seed.study.whole, seed.study.learned
    for site, model in seed.models.items():
        click.echo(f"{run.folder.name}: {site}", err=True)
        rules = referral_rules_of(run, site, known_among(run.classes))
        reported = own.sites[site].rows(own.report_split)
        everyone = whole.sites[site]
        others = np.concatenate([everyone.train, everyone.tune, everyone.rows(whole.report_split)])
        others = others[[bool(learned) and whole.classes[k] not in learned for k in whole.labels[others]]]
        names = [own.classes[k] for k in own.labels[reported]]
        unlearned = [whole.classes[k] for k in whole.labels[others]]
        parts = {
            "own": (own.places(reported), kinds_of(names)),
            "whole": (whole.places(others), kinds_of(unlearned, ", not learned")),
            **{name: (np.arange(len(some)), [name] * len(some)) for name, some in foreign.items()},
        }
        for source, (places, kind) in parts.items():
            if not len(places):
                continue
            said = said_by(model, seed.study.features.of(model, source, places))
            passed = passes(
                said, seed.study.features.pictures[source][places], model.seen, rules, run.preprocess.least_px
            )
            for each in set(kind):
                chosen = np.array([one == each for one in kind])
                kinds[each].add(passed[chosen], said.measures["distance"][chosen])


def kinds_of(labels: Sequence[str], what: str = "") -> list[str]:
    """Name the kind of each row: whether its class asks for a look."""
    asks = suspicious_classes(labels, known_among(labels))
    return [("asks for a look" if one else "benign") + what for one in asks]


def table(kinds: Mapping[str, Passed]) -> Iterator[str]:
    """The counts as Markdown."""
    yield "| pictures | judged | pass every rule | of these, d² above 1 |"
    yield "|---|---:|---:|---:|"
    for name, one in kinds.items():
        yield f"| {name} | {one.pictures:,} | {one.passed:,} ({one.passed / one.pictures:.1%}) | {one.far:,} |"


@click.command()
@click.argument("folders", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--foreign", multiple=True, metavar="textures|skin|PATH", help="Pictures not of the task; repeatable.")
def main(folders: tuple[Path, ...], foreign: tuple[str, ...]) -> None:
    """Count what passes every rule of `edgefl score`, with the models of finished RUNs."""
    kinds: dict[str, Passed] = defaultdict(Passed)
    try:
        runs = [open_run(folder) for folder in folders]
        px = runs[0].backbone.spec.image_px
        strangers = {Path(source).stem: read_foreign(source, px, "none") for source in foreign}
        for run in runs:
            count(run, strangers, kinds)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(table(kinds)))


if __name__ == "__main__":
    main()
