"""How many cancers of a model's own centre pass without a look once their pictures are framed, or lit otherwise.

Each `val` picture of melanoma, basal or squamous cell carcinoma of the centre, 200 x 150, is framed: on all four sides,
above and below, on one side, by a round ring, or by a box in one of its corners, as over a name; in one colour, then
saved as JPEG of quality 75. A frame stands over the picture, as an editor or a print puts it there, and hides what was
below. Counted are the pictures for which the model asks for no look, and beside them those that would pass if the
picture gate saw no frame.
Then each is multiplied by a factor in red, green and blue, as another lamp, white balance or exposure does, and
darkened towards its corners, as a lens or a lamp does: by 1 - k r², where r is 1 in the corners.

    EDGEFL_DATA=DIR python -m benchmarks.device.framed_cancers BUNDLE --trust PUB [--site rosendahl]
"""

import csv
import io
import os
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgefl_client.scoring.scorer import Scorer
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_protocol.pictures.imaging import decode

Pixels = NDArray[np.uint8]  # (H, W, 3)
CANCERS = ("MEL", "BCC", "SCC")
ARCHIVE = "ham10000_msk_200x150.zip"
COLOURS: dict[str, tuple[int, int, int] | None] = {
    "black": (0, 0, 0),
    "grey 30": (30, 30, 30),
    "grey 60": (60, 60, 60),
    "white": (255, 255, 255),
    "its mean colour": None,
}
# of the picture's side, on each side that is framed
WIDTHS = {"frame": (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2), "bars": (0.02, 0.05, 0.1), "one side": (0.05, 0.1, 0.2),
          "ring": (0.0, 0.1), "box in a corner": (0.2, 0.25, 0.3)}  # fmt: skip
INSIDE = 0.02  # of the side: so far from the corner lies every second box of each corner


LIGHTS = {
    "as it is": (1.0, 1.0, 1.0),
    "bluish": (0.8, 1.0, 1.15),
    "slightly bluish": (0.9, 1.0, 1.08),
    "reddish": (1.15, 1.0, 0.8),
    "slightly reddish": (1.08, 1.0, 0.9),
    "greenish": (0.9, 1.1, 0.9),
    "slightly greenish": (0.95, 1.05, 0.95),
    "slightly blue and green": (0.9, 1.02, 0.95),
    "slightly yellow": (1.05, 1.02, 0.88),
    "a quarter of a stop darker": (0.85, 0.85, 0.85),
    "a third of a stop darker": (0.8, 0.8, 0.8),
    "half a stop darker": (0.7, 0.7, 0.7),
    "1.3 stops darker": (0.4, 0.4, 0.4),
    "half a stop brighter": (1.4, 1.4, 1.4),
}
CORNERS = (0.2, 0.4, 0.6, 0.75)  # by how much a vignette darkens them


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--trust", required=True, type=click.Path(path_type=Path, exists=True), help="Public key of its signer.")
@click.option("--site", default="rosendahl", show_default=True, help="Centre whose pictures are framed.")
@click.option("--most", default=60, show_default=True, help="Pictures, the first of the table.")
def main(bundle: Path, trust: Path, site: str, most: int) -> None:
    """Print one row per frame, then one per light."""
    folder = os.environ.get("EDGEFL_DATA")
    if folder is None:
        raise click.ClickException("EDGEFL_DATA is not set; it names the folder with the real images")
    scorer = Scorer(
        load_bundle(bundle.read_bytes(), [read_public_key(trust).public], int(time.time() * 1000)), threads=1
    )
    pictures = cancers(Path(folder) / ARCHIVE, site)[:most]
    click.echo(f"{bundle.name}: {len(pictures)} pictures; without a frame pass {passing(scorer, pictures)[0]}")
    click.echo(
        "| frame | of the side | of the area | " + " | ".join(COLOURS) + " |\n|---|---|---|" + "---|" * len(COLOURS)
    )
    for kind, widths in WIDTHS.items():
        for width in widths:
            found = [
                passing(scorer, [framed(one, kind, width, colour, place) for place, one in enumerate(pictures)])
                for colour in COLOURS.values()
            ]
            share = covered(pictures[0].shape[0], pictures[0].shape[1], kind, width).mean()
            cells = " | ".join(f"{passed} ({ungated})" for passed, ungated in found)
            click.echo(f"| {kind} | {100 * width:g} % | {share:.0%} | {cells} |")
            sys.stdout.flush()
    click.echo("\n| light | red, green, blue | pass |\n|---|---|---|")
    for name, factors in LIGHTS.items():
        click.echo(
            f"| {name} | × {', '.join(f'{one:g}' for one in factors)} | {passing(scorer, lit(pictures, factors))[0]} |"
        )
        sys.stdout.flush()
    click.echo("\n| corners darker by | pass, mean brightness kept | not kept |\n|---|---|---|")
    for share in CORNERS:
        told = [passing(scorer, [vignetted(one, share, kept) for one in pictures])[0] for kept in (True, False)]
        click.echo(f"| {share:.0%} | {told[0]} | {told[1]} |")
        sys.stdout.flush()


def passing(scorer: Scorer, pictures: list[Pixels]) -> tuple[int, int]:
    """Count the pictures that no rule refers, and those that none would refer without `dark_corners`."""
    prepared = [scorer.prepare(one) for one in pictures]
    passed = sum(not one.refer for one in scorer.score_batch(prepared))
    blind = [replace(one, judged=replace(one.judged, faults=without_frame(one.judged.faults))) for one in prepared]
    return passed, sum(not one.refer for one in scorer.score_batch(blind))


def without_frame(faults: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in faults if name != "dark_corners")


def cancers(archive_path: Path, site: str) -> list[Pixels]:
    """Read the `val` pictures of cancers of a centre, in the order of the table."""
    with zipfile.ZipFile(archive_path) as archive:
        rows = csv.DictReader(io.StringIO(archive.read("index.csv").decode()))
        return [
            decode(archive.read(row["file"]))
            for row in rows
            if row["split"] == "val" and row["center"] == site and row["label"] in CANCERS
        ]


def covered(height: int, width: int, kind: str, share: float, place: int = 0) -> NDArray[np.float64]:
    """How much of each pixel the frame covers, (H, W), 0 to 1; `share` of the side is its width.

    `place` counts the pictures: it chooses the corner of a box, and whether the box lies a little inside.
    """
    y, x = (np.mgrid[0:height, 0:width] + 0.5) / np.array([height, width])[:, None, None]
    if kind == "box in a corner":
        near = INSIDE * (place // 4 % 2)
        down, across = (1 - y if place & 1 else y), (1 - x if place & 2 else x)
        lies: NDArray[np.bool_] = (near <= np.minimum(down, across)) & (np.maximum(down, across) < near + share)
        return lies.astype(np.float64)
    if kind == "ring":  # touches the sides, or keeps `share` from them
        ring: NDArray[np.float64] = np.clip((np.hypot(x - 0.5, y - 0.5) - 0.5 + share) / 0.02, 0, 1)
        return ring
    away: dict[str, NDArray[np.float64]] = {
        "frame": np.minimum(np.minimum(y, 1 - y), np.minimum(x, 1 - x)),
        "bars": np.minimum(y, 1 - y),
        "one side": y,
    }
    inside: NDArray[np.float64] = (away[kind] < share).astype(np.float64)
    return inside


def lit(pictures: list[Pixels], factors: tuple[float, float, float]) -> list[Pixels]:
    """Multiply the colours of pictures; what is too bright then is white."""
    return [np.rint(np.minimum(one * np.array(factors), 255)).astype(np.uint8) for one in pictures]


def vignetted(picture: Pixels, share: float, kept: bool) -> Pixels:
    """Darken a picture towards its corners, by `share` there; then brighten it to its mean where that is kept."""
    y, x = (np.arange(side) * 2 + 1 - side for side in picture.shape[:2])
    away = ((y / len(y))[:, None] ** 2 + (x / len(x)) ** 2) / 2
    darker: NDArray[np.float64] = picture * (1 - share * away)[..., None]
    return np.rint(np.minimum(darker * (picture.mean() / darker.mean() if kept else 1), 255)).astype(np.uint8)


def framed(picture: Pixels, kind: str, share: float, colour: tuple[int, int, int] | None, place: int = 0) -> Pixels:
    """Frame a picture and save it as JPEG of quality 75."""
    over = covered(picture.shape[0], picture.shape[1], kind, share, place)[..., None]
    painted = picture.mean((0, 1)) if colour is None else np.array(colour)
    mixed = np.rint(picture * (1 - over) + painted * over).astype(np.uint8)
    saved = io.BytesIO()
    Image.fromarray(mixed).save(saved, "JPEG", quality=75)
    return decode(saved.getvalue())


if __name__ == "__main__":
    main()
