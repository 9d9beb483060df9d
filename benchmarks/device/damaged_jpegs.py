"""How many damaged JPEGs the device refuses: some bytes of the compressed picture overwritten at random.

Undamaged photographs are decoded, too, and copied 200 times a row with one run of bytes overwritten somewhere after the
start of the scan. A row counts the copies that `decode` refuses, those of the others that the picture gate
refers, and those of which neither tells anything. No model takes part.

    EDGEFL_DATA=DIR python -m benchmarks.device.damaged_jpegs
"""

import os
import random
import zipfile
from collections import Counter
from pathlib import Path

import click

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import decode
from edgefl_protocol.pictures.quality import measure_quality

SETS = {"fed_isic2019_84.zip": "84 px", "ham10000_msk_200x150.zip": "200 x 150"}
COPIES = 200
OVERWRITTEN = (1, 20, 500)  # bytes
SHARE = 3  # of a small picture's scan no more than a third is overwritten
START_OF_SCAN = b"\xff\xda"


def damaged(data: bytes, count: int, draw: random.Random) -> bytes:
    """Overwrite up to so many bytes in one place of the scan."""
    start = data.rindex(START_OF_SCAN) + 14  # its header has 12 bytes for three components
    count = min(count, (len(data) - 2 - start) // SHARE)
    at = draw.randrange(start, len(data) - 2 - count)
    return data[:at] + draw.randbytes(count) + data[at + count :]


def outcome(data: bytes) -> str:
    """Say who tells that something is wrong with a picture."""
    try:
        return "referred" if measure_quality(decode(data)).reasons(1) else "passed"
    except ImageError:
        return "refused"


@click.command()
def main() -> None:
    """Print one row for each set of photographs and each number of overwritten bytes."""
    folder = os.environ.get("EDGEFL_DATA")
    if folder is None:
        raise click.ClickException("EDGEFL_DATA is not set; it names the folder with the real images")
    draw = random.Random(0)
    click.echo("| photographs | bytes overwritten | refused | referred | neither |\n|---|---:|---:|---:|---:|")
    for name, size in SETS.items():
        with zipfile.ZipFile(Path(folder) / name) as archive:
            names = sorted(one for one in archive.namelist() if one.endswith(".jpg"))
            photos = [archive.read(one) for one in names[:: len(names) // COPIES][:COPIES]]
        for count in (0, *OVERWRITTEN):
            found = Counter(outcome(damaged(one, count, draw) if count else one) for one in photos)
            told = " | ".join(f"{100 * found[key] / COPIES:.1f} %" for key in ("refused", "referred", "passed"))
            click.echo(f"| {size} | {count or 'none'} | {told} |")


if __name__ == "__main__":
    main()
