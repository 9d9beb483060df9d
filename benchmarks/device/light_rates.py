"""How often the rule `light` refers: real pictures, and cancers that are lit otherwise.

The range of each centre is that of its `train` pictures, as a run finds it. Judged are the `val` pictures of the centre
itself and of the others, at 84 px; and the first 60 cancers of the centre's, each multiplied in red, green and blue.
Two columns each: a model that learned from pictures as they are, and one that removes the colour of the light, of which
the brightness alone is compared.

    EDGEFL_DATA=DIR python -m benchmarks.device.light_rates
"""

import csv
import io
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.device.framed_cancers import CANCERS, CORNERS, LIGHTS, lit, vignetted
from edgefl_protocol.pictures.imaging import Pixels, decode, shades_of_grey
from edgefl_protocol.pictures.light import Light, LightRange, measure_light, range_of

MOST = 60  # cancers of a centre


@dataclass(frozen=True)
class Picture:
    """One row of the table."""

    centre: str
    split: str
    label: str
    pixels: Pixels
    light: Light  # of the picture as it is
    corrected: Light  # without the colour of its light


@click.command()
def main() -> None:
    """Print two tables."""
    folder = os.environ.get("EDGEFL_DATA")
    if folder is None:
        raise click.ClickException("EDGEFL_DATA is not set; it names the folder with the real images")
    found = pictures(Path(folder) / "fed_isic2019_84.zip")
    centres = sorted({one.centre for one in found})
    ranges = {centre: ranges_of(found, centre) for centre in centres}
    click.echo("| `val` pictures of | number | " + " | ".join(f"by a model of {centre}" for centre in centres) + " |")
    click.echo("|---|---:|" + "---:|" * len(centres))
    for centre in centres:
        lights = [(one.light, one.corrected) for one in found if (one.centre, one.split) == (centre, "val")]
        cells = " | ".join(" / ".join(f"{one:.1%}" for one in shares(ranges[model], lights)) for model in centres)
        click.echo(f"| {centre} | {len(lights):,} | {cells} |")
    click.echo("\n| cancers in another light | red, green, blue | " + " | ".join(centres) + " |")
    click.echo("|---|---|" + "---:|" * len(centres))
    cancers = {centre: cancers_of(found, centre) for centre in centres}
    for name, factors in LIGHTS.items():
        seen = {centre: lit(cancers[centre], factors) for centre in centres}
        click.echo(f"| {name} | {', '.join(f'{one:g}' for one in factors)} | {_cells(ranges, seen)} |")
    for share in CORNERS:
        seen = {centre: [vignetted(one, share, True) for one in cancers[centre]] for centre in centres}
        click.echo(f"| corners {share:.0%} darker | mean kept | {_cells(ranges, seen)} |")


def _cells(ranges: Mapping[str, tuple[LightRange, LightRange]], seen: Mapping[str, list[Pixels]]) -> str:
    """Write how many of each centre's pictures either model refers."""
    return " | ".join(
        " / ".join(str(round(one * len(found))) for one in shares(ranges[centre], [lights_of(one) for one in found]))
        + f" of {len(found)}"
        for centre, found in seen.items()
    )


def pictures(archive_path: Path) -> list[Picture]:
    """Read the pictures that teach and those that judge."""
    with zipfile.ZipFile(archive_path) as archive:
        table = csv.DictReader(io.StringIO(archive.read("index.csv").decode()))
        rows = [row for row in table if row["split"] in ("train", "val")]
        read = ((row, decode(archive.read(row["file"]))) for row in rows)
        return [Picture(row["center"], row["split"], row["label"], one, *lights_of(one)) for row, one in read]


def lights_of(picture: Pixels) -> tuple[Light, Light]:
    """Measure a picture as it is, and without the colour of its light."""
    return measure_light(picture), measure_light(shades_of_grey(picture))


def ranges_of(found: list[Picture], centre: str) -> tuple[LightRange, LightRange]:
    """Find the ranges of a centre: with colour, and without."""
    learned = [one for one in found if (one.centre, one.split) == (centre, "train")]
    whole = range_of([one.light for one in learned])
    bright = range_of([one.corrected for one in learned], "shades_of_grey_6")
    if whole is None or bright is None:
        raise click.ClickException(f"{centre} has too few pictures")
    return whole, bright


def cancers_of(found: list[Picture], centre: str) -> list[Pixels]:
    """Give the first `val` pictures of cancers of a centre."""
    return [one.pixels for one in found if (one.centre, one.split) == (centre, "val") and one.label in CANCERS][:MOST]


def shares(usual: tuple[LightRange, LightRange], lights: list[tuple[Light, Light]]) -> tuple[float, ...]:
    """Share of the pictures that the rule refers, by either model."""
    found = zip(usual, zip(*lights, strict=True), strict=True)
    return tuple(sum(one.unlike(light) is not None for light in seen) / len(seen) for one, seen in found)


if __name__ == "__main__":
    main()
