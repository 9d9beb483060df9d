"""How many real `val` pictures pass a model without a look: by centre and class, and of cancers and of benign classes
together, at 200 x 150 and at 84 px. Of benign classes, those that do not pass are referred by any rule.

The larger pictures are HAM10000 and MSK; bcn is told at 84 px alone, and its cancers once more by how much is black:
a third of that centre's pictures has a black frame (docs/decisions/0050).

`--turned` counts, of the larger pictures, those whose named class or recommendation hangs on how they are turned.

    EDGEFL_DATA=DIR python -m benchmarks.device.passing_pictures BUNDLE --trust PUB
"""

import csv
import io
import os
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.device.framed_cancers import ARCHIVE, CANCERS
from edgefl_client.scoring.scorer import Scorer
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_protocol.pictures.class_info import KNOWN
from edgefl_protocol.pictures.imaging import decode
from edgefl_protocol.pictures.light import LIT_FROM, LUMINANCE

SMALL = "fed_isic2019_84.zip"
BATCH, MOSTLY_BLACK, MOST = 64, 0.35, 200


def passed_by_class(scorer: Scorer, archive: Path, centres: frozenset[str] | None = None) -> dict[str, Counter[str]]:
    """Count the `val` pictures of each centre: of each class, and those of it that no rule refers."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for some, pictures in _batches(archive, centres):
        for row, score in zip(some, scorer.score_batch(pictures), strict=True):
            counts, names = found[row["center"]], (row["label"], *_together(row["label"]))
            counts.update(names)
            counts.update(f"{one} pass" for one in names if not score.refer)
    return found


def _batches(
    archive: Path, centres: frozenset[str] | None
) -> Iterator[tuple[list[dict[str, str]], list[NDArray[np.uint8]]]]:
    """Read the `val` pictures, some at a time, with their rows."""
    with zipfile.ZipFile(archive) as opened:
        rows = [one for one in csv.DictReader(io.StringIO(opened.read("index.csv").decode())) if one["split"] == "val"]
        rows = [one for one in rows if centres is None or one["center"] in centres]
        for start in range(0, len(rows), BATCH):
            some = rows[start : start + BATCH]
            yield some, [decode(opened.read(one["file"])) for one in some]


def hanging_on_the_turn(scorer: Scorer, archive: Path) -> dict[str, Counter[str]]:
    """Count by centre the pictures whose class or recommendation differs between four turns of the photograph.

    The recommendation twice: of the turns as they are, and as `edgefl score` gives it.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for some, pictures in _batches(archive, None):
        four = [
            scorer.score_batch([np.ascontiguousarray(np.rot90(one, quarter)) for one in pictures])
            for quarter in range(4)
        ]
        for row, scores in zip(some, zip(*four, strict=True), strict=True):
            counts = found[row["center"]]
            counts["pictures"] += 1
            counts["class"] += len({score.predicted for score in scores}) > 1
            counts["as it is"] += len({score.refer_reasons in ((), ("unsteady",)) for score in scores}) > 1
            counts["recommendation"] += len({score.refer for score in scores}) > 1
    return found


def _together(label: str) -> tuple[str, ...]:
    """Name what a class is counted with besides itself; AK is premalignant, and neither."""
    return ("cancers",) if label in CANCERS else ("benign classes",) if KNOWN[label].malignancy == "benign" else ()


def passed_by_black(scorer: Scorer, archive: Path, centre: str = "bcn") -> dict[str, tuple[int, int]]:
    """Count cancers of a centre, of pictures that are mostly black and of others: all, and those that pass."""
    found = {"more than 35 % black": [0, 0], "others": [0, 0]}
    with zipfile.ZipFile(archive) as opened:
        for row in csv.DictReader(io.StringIO(opened.read("index.csv").decode())):
            if row["center"] != centre or row["label"] not in CANCERS:
                continue
            picture = decode(opened.read(row["file"]))
            counts = found[
                "more than 35 % black" if (picture @ LUMINANCE < LIT_FROM).mean() > MOSTLY_BLACK else "others"
            ]
            if counts[0] < MOST:
                counts[0] += 1
                counts[1] += not scorer.score(picture).refer
    return {name: (of, passed) for name, (of, passed) in found.items()}


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--trust", required=True, type=click.Path(path_type=Path, exists=True), help="Public key of its signer.")
@click.option("--turned", is_flag=True, help="Print instead how many pictures hang on how they are turned.")
def main(bundle: Path, trust: Path, turned: bool) -> None:
    """Print how many `val` pictures pass BUNDLE."""
    folder = Path(os.environ["EDGEFL_DATA"])
    keys = [read_public_key(trust).public]
    scorer = Scorer(load_bundle(bundle.read_bytes(), keys, time.time_ns() // 1_000_000), threads=1)
    if turned:
        for centre, counts in sorted(hanging_on_the_turn(scorer, folder / ARCHIVE).items()):
            click.echo(
                f"{centre}, of {counts['pictures']} pictures hang on the turn: the class of {counts['class']}, "
                f"what the rules say unturned of {counts['as it is']}, the recommendation of {counts['recommendation']}"
            )
        return
    for size, archive, centres in (("200 x 150", ARCHIVE, None), ("84 px", SMALL, frozenset({"bcn"}))):
        for centre, counts in sorted(passed_by_class(scorer, folder / archive, centres).items()):
            told = ", ".join(f"{name} {counts[f'{name} pass']} of {counts[name]}" for name in _names(counts))
            click.echo(f"{centre}, {size}: {told}")
    for name, (of, passed) in passed_by_black(scorer, folder / SMALL).items():
        click.echo(f"bcn, cancers, {name}: {passed} of {of}")


def _names(counts: Counter[str]) -> list[str]:
    return sorted(name for name in counts if not name.endswith(" pass"))


if __name__ == "__main__":
    main()
