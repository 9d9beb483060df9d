"""How often the picture gate refers by mistake, and what it catches (`edgefl_protocol.pictures.quality`).

By mistake: the validation rows of the real centres, at 84 px and, where they are there, at 200 x 150. Caught: drawn
textures, the radiology images of VQA-RAD, and the validation rows made worse on purpose: blurred (standard deviation in
pixels of an 84-px picture), darkened and brightened by stops (factors of two of linear light, gamma 2.2, clipped to 8
bits). Drawn skin and lesions of six sites stand beside, with skin from light to dark. No model takes part.

    EDGEFL_DATA=DIR python -m benchmarks.device.picture_gate_rates [--json]
"""

import csv
import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from edgefl_protocol.pictures.imaging import decode, resize
from edgefl_protocol.pictures.quality import MOST_UNLIT, measure_quality, usual_unlit
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.data.lesions.signs import SIGNS
from edgefl_trainer.data.sources.foreign import read_foreign

Pixels = NDArray[np.uint8]  # (H, W, 3)
PX = 84
SHOWN = ("blur", "exposure", "not_skin", "dark_corners")  # `size` depends on the network
EVERY = 8  # of the validation rows are made worse
BLURS_PX = (0.7, 1.0, 1.5, 2.0)
STOPS = (-6, -5, -4, -3, 1, 1.5, 2, 3)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(as_json: bool) -> None:
    """Print one row per set of pictures."""
    folder = os.environ.get("EDGEFL_DATA")
    if folder is None:
        raise click.ClickException("EDGEFL_DATA is not set; it names the folder with the real images")
    rows = [rates(name, pictures) for name, pictures in sets(Path(folder))]
    rows += [rates(*one) for one in by_their_own_model(Path(folder))]
    if as_json:
        click.echo(json.dumps(rows))
        return
    click.echo("| pictures | number | any | " + " | ".join(SHOWN) + " |")
    click.echo("|---|---|---|" + "---|" * len(SHOWN))
    for row in rows:
        shares = " | ".join(f"{100 * float(row[key]):.1f} %" for key in ("any", *SHOWN))
        click.echo(f"| {row['pictures']} | {row['number']:,} | {shares} |")


def rates(name: str, pictures: Iterable[Pixels], unlit_above: float = MOST_UNLIT) -> dict[str, str | int | float]:
    """Share of the pictures that each reason refers."""
    found = [measure_quality(picture).reasons(1, unlit_above) for picture in pictures]
    return {
        "pictures": name,
        "number": len(found),
        "any": float(np.mean([bool(one) for one in found])),
        **{reason: float(np.mean([reason in one for one in found])) for reason in SHOWN},
    }


def sets(folder: Path) -> Iterator[tuple[str, list[Pixels]]]:
    """Every set by name."""
    real = rows_of(folder / "fed_isic2019_84.zip")
    for centre in sorted({centre for centre, _ in real}):
        yield f"{centre}, 84 px", [picture for found, picture in real if found == centre]
    yield "all centres, 84 px", [picture for _, picture in real]
    if (folder / "ham10000_msk_200x150.zip").exists():
        yield "five centres, 200 x 150", [one for _, one in rows_of(folder / "ham10000_msk_200x150.zip")]
    yield "drawn skin", list(read_foreign("skin", PX))
    yield (
        "drawn lesions",
        [draw_lesion(c, site=s, number=n, px=PX)[0] for s in range(6) for c in SIGNS for n in range(5)],
    )
    yield "drawn textures", list(read_foreign("textures", PX))
    with zipfile.ZipFile(folder / "vqa_rad.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        yield "radiology", [resize(decode(archive.read(name)), PX) for name in names]
    some = [picture for _, picture in real[::EVERY]]
    for blur in BLURS_PX:
        yield f"blurred by {blur} px", [blurred(one, blur) for one in some]
    for stops in STOPS:
        yield f"{stops:+g} stops of light", [relit(one, stops) for one in some]


def by_their_own_model(folder: Path) -> Iterator[tuple[str, list[Pixels], float]]:
    """Yield centres whose pictures are often framed in black, with the share that a model of their own allows."""
    learned, real = (rows_of(folder / "fed_isic2019_84.zip", split) for split in ("train", "val"))
    for centre in sorted({centre for centre, _ in real}):
        allowed = usual_unlit(picture for found, picture in learned if found == centre)
        if allowed > MOST_UNLIT:
            own = [picture for found, picture in real if found == centre]
            yield f"{centre}, 84 px, by a model of its own ({allowed:.0%} may be black)", own, allowed


def rows_of(archive_path: Path, split: str = "val") -> list[tuple[str, Pixels]]:
    """Centre and pixels of each row of a split."""
    with zipfile.ZipFile(archive_path) as archive:
        rows = csv.DictReader(io.StringIO(archive.read("index.csv").decode()))
        return [(row["center"], decode(archive.read(row["file"]))) for row in rows if row["split"] == split]


def blurred(picture: Pixels, deviation_px: float) -> Pixels:
    return np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(deviation_px)))


def relit(picture: Pixels, stops: float) -> Pixels:
    linear = (picture / 255.0) ** 2.2 * 2.0**stops
    return np.asarray(np.clip(linear, 0, 1) ** (1 / 2.2) * 255 + 0.5).astype(np.uint8)


if __name__ == "__main__":
    main()
