"""Parts of a picture hidden: by it a map is made, by it a map is judged, and what it marks is what is drawn.

A map has a value for each cell of a square grid over the picture, row by row. It marks the quarter of the cells with
the largest values. Cells are hidden by the mean colour of the picture or by a strong blur; a map by occlusion is the
fall of the answer's probability where one cell after the other is hidden by the mean colour. Trainer and export measure
with these functions how true a map is, and a device computes and outlines with them what was measured.

Source: Zeiler and Fergus (arXiv 1311.2901) section 4.2, occlusion; Petsiuk et al., RISE (arXiv 1806.07421) section
4.3, deletion and insertion; docs/methods.md 1.8.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Pictures = NDArray[np.uint8]  # (n, S, S, 3)
Cells = NDArray[np.bool_]  # (n, N), True for the cells meant
Maps = NDArray[np.float32]  # (n, N)

MARKED_SHARE: Final = 0.25  # of the cells
BLUR_SHARE: Final = 0.1  # standard deviation of the blur, of the picture's side
RANDOM_QUARTERS: Final = 2  # hidden of each picture and way, beside the quarter that the map marks
LEAST_STRONGEST: Final = 0.5  # the largest value of a map; below it a map is level
LEAST_SPREAD: Final = 0.10  # between the largest value of a map and its ground; below it a map is level
OUTLINED_FROM: Final = 0.5  # of the way from a map's ground to its largest value; what lies below is not outlined
LEAST_FALL: Final = 0.01  # of a probability: an occlusion map whose largest fall is smaller stays as pale as it is
# Of a probability: where hiding no cell lowers it by so much, no cell is shown to matter. A probability is written in
# whole percents: one step may be rounding, two are a difference. docs/reference/scores.md.
LEAST_SHOWN_FALL: Final = 0.02


def marked_cells(count: int) -> int:
    """Count the cells that a map of `count` cells marks: a quarter, at least one."""
    return max(1, round(MARKED_SHARE * count))


def strongest_cells(maps: Maps, rng: np.random.Generator | None = None) -> Cells:
    """Mark the quarter of each map's cells with the largest values.

    Args:
        maps: of any sign, (n, N).
        rng: draws the order of equal values, so that a level map marks a random quarter; None takes the first of them.
    """
    count, cells = maps.shape
    shuffled = np.broadcast_to(np.arange(cells), maps.shape)
    if rng is not None:
        shuffled = rng.permuted(shuffled, axis=1)
    ranked = np.argsort(-np.take_along_axis(maps, shuffled, axis=1), axis=1, kind="stable")
    chosen = np.take_along_axis(shuffled, ranked, axis=1)[:, : marked_cells(cells)]
    marked = np.zeros((count, cells), dtype=np.bool_)
    np.put_along_axis(marked, chosen, True, axis=1)
    return marked


def ground(values: NDArray[np.float32]) -> float:
    """Give the value of a map (N,) that marks nothing: its smallest, or 0 where cells speak against the answer."""
    return max(0.0, float(values.min()))


def is_level(values: NDArray[np.float32]) -> bool:
    """Tell whether no cell of a map (N,) stands out enough to be shown: it must not look like a finding."""
    return float(values.max()) < max(LEAST_STRONGEST, ground(values) + LEAST_SPREAD)


def marks_nothing(values: NDArray[np.float32], fall: float | None) -> bool:
    """Tell whether a map (N,) is not to be shown: it is level, or what it marks hardly matters to the answer.

    Args:
        fall: of the answer's probability where the strongest cell is hidden; None for a map not made by hiding cells.
    """
    return is_level(values) or (fall is not None and fall < LEAST_SHOWN_FALL)


def outlined_cells(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mark what is outlined of one map (N,): of its quarter the cells that are half as strong as the strongest.

    A level map has none.
    """
    if is_level(values):
        return np.zeros(values.shape, dtype=np.bool_)
    low = ground(values)
    strong = values >= low + OUTLINED_FROM * (float(values.max()) - low)
    return np.asarray(strong & strongest_cells(values[None])[0])


def random_cells(count: int, cells: int, rng: np.random.Generator) -> Cells:
    """Mark a random quarter of the cells for each of `count` pictures."""
    return strongest_cells(np.zeros((count, cells), dtype=np.float32), rng)


def pixels_of(cells: Cells, side_px: int) -> NDArray[np.bool_]:
    """Spread cells (n, N) over the pixels of a square picture, (n, S, S).

    Raises:
        ValueError: N is not a square number.
    """
    grid = grid_side(cells.shape[1])
    of_pixel = np.arange(side_px) * grid // side_px  # the row, or the column, of each pixel
    return cells.reshape(-1, grid, grid)[:, of_pixel][:, :, of_pixel]


def grid_side(cells: int) -> int:
    """Count the cells along one side of a square grid; a `ValueError` where their number is not a square."""
    side = math.isqrt(cells)
    if side * side != cells:
        raise ValueError(f"a map of {cells} cells is not a square grid")
    return side


def mean_colours(pictures: Pictures) -> Pictures:
    """Give each picture's mean colour, (n, 1, 1, 3)."""
    means: Pictures = np.round(pictures.mean(axis=(1, 2), keepdims=True)).astype(np.uint8)
    return means


def blurred(pictures: Pictures) -> Pictures:
    """Blur pictures by a Gaussian of a tenth of their side; beyond the edge lies nothing, and weights are rescaled."""
    side = pictures.shape[1]
    apart = (np.arange(side)[:, None] - np.arange(side)) / (BLUR_SHARE * side)
    weights = np.exp(-0.5 * apart**2)
    axis = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)  # (S, S)
    planes = pictures.transpose(0, 3, 1, 2).astype(np.float32)  # (n, 3, S, S)
    found: Pictures = np.round(axis @ planes @ axis.T).astype(np.uint8).transpose(0, 2, 3, 1)
    return found


def hidden(pictures: Pictures, cells: Cells, cover: Pictures) -> Pictures:
    """Hide cells under what `mean_colours` or `blurred` gave for the same pictures."""
    return np.where(pixels_of(cells, pictures.shape[1])[..., None], cover, pictures)


def each_cell_hidden(picture: NDArray[np.uint8], cells: int) -> Pictures:
    """Give a picture (S, S, 3) with one cell after the other hidden by its mean colour, (N, S, S, 3)."""
    pictures = np.broadcast_to(picture, (cells, *picture.shape))
    return hidden(pictures, np.eye(cells, dtype=np.bool_), mean_colours(picture[None]))


def occlusion_map(probability: float, without: NDArray[np.float32]) -> NDArray[np.float32]:
    """Make the map of how much the answer's probability falls where a cell is hidden.

    Args:
        probability: of the answer, for the whole picture.
        without: the same class's, with each cell hidden in turn, (N,).

    Returns:
        Falls divided by the largest, or by `LEAST_FALL` where none is so large; negative where hiding a cell helps.
    """
    falls = np.float32(probability) - without
    return np.asarray(falls / max(float(falls.max()), LEAST_FALL), dtype=np.float32)
