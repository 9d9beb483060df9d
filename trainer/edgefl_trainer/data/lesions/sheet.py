"""A contact sheet of drawn lesions: `python -m edgefl_trainer.data.lesions.sheet -o sheet.png`.

One row for each site, the classes side by side, healthy skin at the end.
"""

from pathlib import Path

import click
import numpy as np
from PIL import Image, ImageDraw

from edgefl_trainer.data.lesions.pixels import draw_lesion, draw_skin
from edgefl_trainer.data.lesions.signs import SIGNS
from edgefl_trainer.data.lesions.view import Photo

_GAP = 3  # pixels between pictures
_HEAD = 18  # pixels above the columns


def contact_sheet(sites: int, per_class: int, px: int, seed: int, outlines: bool) -> Image.Image:
    """Draw the sheet; `outlines` marks the border of each mask."""
    labels = [label for label in SIGNS for _ in range(per_class)] + ["skin"]
    cell = px + _GAP
    sheet = Image.new("RGB", (cell * len(labels) + _GAP, cell * sites + _GAP + _HEAD), "white")
    pen = ImageDraw.Draw(sheet)
    for column, label in enumerate(labels):
        pen.text((_GAP + column * cell, 3), label, fill="black")
        for site in range(sites):
            picture = _picture(label, site, column, px, sites, seed, outlines)
            sheet.paste(Image.fromarray(picture), (_GAP + column * cell, _HEAD + site * cell))
    return sheet


def _picture(label: str, site: int, number: int, px: int, sites: int, seed: int, outlines: bool) -> Photo:
    if label == "skin":
        return draw_skin(site=site, number=number, px=px, sites=sites, seed=seed)
    image, mask = draw_lesion(label, site=site, number=number, px=px, sites=sites, seed=seed)
    if outlines:
        inside = mask > 0
        core = inside.copy()
        for axis in (0, 1):
            for step in (-1, 1):
                core &= np.roll(inside, step, axis)
        image[inside & ~core] = (60, 255, 60)
    return image


@click.command()
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="PNG to write.")
@click.option("--sites", default=6, show_default=True, metavar="N", help="Rows of the sheet.")
@click.option("--per-class", default=2, show_default=True, metavar="N", help="Lesions of each class in a row.")
@click.option("--px", default=128, show_default=True, metavar="PIXELS", help="Side of a picture.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of everything drawn.")
@click.option("--outlines", is_flag=True, help="Mark the border of each lesion mask.")
def main(out: Path, sites: int, per_class: int, px: int, seed: int, outlines: bool) -> None:
    """Write a contact sheet of drawn lesions, one row for each site."""
    contact_sheet(sites, per_class, px, seed, outlines).save(out)
    click.echo(f"{sites} sites, {len(SIGNS)} classes: {out}", err=True)


if __name__ == "__main__":
    main()
