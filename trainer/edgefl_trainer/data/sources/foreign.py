"""Pictures that do not belong to the task, to judge whether a model knows that it does not know them.

Sources: `textures` and `skin` are drawn (patterns; skin without a lesion), anything else is a folder or zip of
pictures. Guarantees: every picture goes through `edgefl_protocol.pictures.imaging`, in name order; drawn ones repeat
exactly.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import Colour, correct_colour, decode, resize
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.lesions import draw_skin
from edgefl_trainer.data.sources.store import is_image_name, open_store
from edgefl_trainer.data.sources.textures import draw_texture

DRAWN = 240  # pictures of a drawn source
DRAWN_SITES = 6  # styles of the drawn skin
MAX_PICTURES = 5_000  # all are in memory at once


def read_foreign(
    source: str, image_px: int, colour: Colour = "none", taught: TaughtPictures | None = None
) -> NDArray[np.uint8]:
    """Read the pictures of one source, uint8 (n, px, px, 3).

    Args:
        source: `textures`, `skin`, or the path of a folder or zip.
        colour: What becomes of the colour of the light, see `imaging.correct_colour`.
        taught: What a photograph is made like first, as a device does; drawn pictures stay as they are.

    Raises:
        DataError: There is no picture, there are too many, or one cannot be read.
    """
    return np.stack([correct_colour(one, colour) for one in _pictures(source, image_px, taught)])


def _pictures(source: str, image_px: int, taught: TaughtPictures | None) -> Iterator[NDArray[np.uint8]]:
    if source == "textures":
        yield from (draw_texture(i, px=image_px) for i in range(DRAWN))
        return
    if source == "skin":
        places = (divmod(i, DRAWN_SITES) for i in range(DRAWN))
        yield from (draw_skin(site=site, number=number, px=image_px) for number, site in places)
        return
    store = open_store(Path(source).expanduser())
    names = [name for name in store.names() if is_image_name(name)]
    if not 1 <= len(names) <= MAX_PICTURES:
        raise DataError(f"{source} holds {counted(len(names), 'picture')}; allowed: 1 to {MAX_PICTURES}.")
    for name in names:
        try:
            image = decode(store.read(name))
            yield resize(image if taught is None else taught.made_like(image, "squash"), image_px)
        except ImageError as error:
            raise DataError(f"{name} in {source} cannot be used: {str(error).rstrip('.')}.") from error
