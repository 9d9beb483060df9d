"""The export gates: graph and trainer must score alike, or there is no bundle.

On at least 64 images, each with a question where the model answers some, in batches of 1 and of 8: probabilities,
vacuity and dissonance within 1e-4; evidence within 1e-4·(1 + evidence); max-normalised map, and the map that is shown,
within 1e-3; a map by occlusion, on two of the images, within 2e-2. The worst figure of each is reported. A value that
is not finite fails. Source: docs/design.md, section 7, export gates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray

from edgefl_export.errors import GateError
from edgefl_protocol.bundle.question_table import INPUT
from edgefl_protocol.processor import session_settings
from edgefl_protocol.rules.hidden_regions import each_cell_hidden, occlusion_map
from edgefl_protocol.rules.questions import FIRST, PADDING, UNKNOWN
from edgefl_trainer.models.answers import AnswerModule
from edgefl_trainer.models.scoring import ScoreModule

MIN_IMAGES = 64
BATCHES = (1, 8)
TRAINER_BATCH = 8
TOLERANCES: Mapping[str, float] = {
    "probabilities": 1e-4,
    "evidence": 1e-4,  # relative to 1 + evidence
    "vacuity": 1e-4,
    "dissonance": 1e-4,
    "map": 1e-3,
    "shown": 1e-3,  # where both name the same class: a share is of that class
    "occlusion": 2e-2,  # two probabilities, divided by a fall of at least LEAST_FALL
}
OCCLUDED = 2  # images whose occlusion is compared

Arrays = Mapping[str, NDArray[np.float32]]
Pictures = UInt8[np.ndarray, "n S S 3"]
AskedWords = Int[np.ndarray, "n L"]  # numbers of words


@dataclass(frozen=True)
class Parity:
    """Largest difference found for one quantity, over all images and batch sizes."""

    quantity: str
    worst: float
    allowed: float
    batch: int

    @property
    def passed(self) -> bool:
        """Within the gate; never for a value that is not a number."""
        return self.worst <= self.allowed


def parity_images(side: int, count: int = MIN_IMAGES, seed: int = 0) -> Pictures:
    """Draw pictures that span what a camera gives: smooth skin, a dark spot, gradients, noise, black and white."""
    rng = np.random.default_rng(seed)
    axis = np.linspace(-1, 1, side)
    x, y = axis[None, :, None], axis[:, None, None]
    images = np.empty((count, side, side, 3), dtype=np.uint8)
    for index in range(count):
        skin, spot = rng.uniform(90, 255, 3), rng.uniform(0, 150, 3)
        centre, spread = rng.uniform(-0.6, 0.6, 2), rng.uniform(0.05, 0.6)
        weight = np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / spread**2)
        slope = rng.uniform(-60, 60) * x + rng.uniform(-60, 60) * y
        noise = rng.normal(0, rng.choice([0, 5, 40]), (side, side, 3))
        images[index] = np.clip(skin + (spot - skin) * weight + slope + noise, 0, 255)
    images[0], images[1] = 0, 255
    return images


def parity_questions(words: int, length: int, count: int = MIN_IMAGES) -> AskedWords:
    """Draw questions of every length that a network reads, known and unknown words among them.

    Args:
        words: how many it knows.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(UNKNOWN, FIRST + words, (count, length))
    return np.where(np.arange(length) < rng.integers(1, length + 1, (count, 1)), tokens, PADDING)


def trainer_scores(
    module: ScoreModule | AnswerModule,
    tensors: Arrays,
    images: Pictures,
    questions: AskedWords | None = None,
) -> Arrays:
    """Return what the trainer says of these images, or to these questions: outputs by name, n rows each."""
    values = {name: torch.from_numpy(np.array(tensors[name])) for name in module.options.tensors}
    given = [images] if questions is None else [images, questions]
    with torch.inference_mode():
        parts = [
            module(*(torch.from_numpy(np.array(one[start : start + TRAINER_BATCH])) for one in given), values).named()
            for start in range(0, len(images), TRAINER_BATCH)
        ]
    return {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}


def open_session(graph: bytes) -> onnxruntime.InferenceSession:
    """Load a graph of our own as a device does; its threads do not spin while they wait."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name, value in session_settings().items():
        options.add_session_config_entry(name, value)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def network_inputs(images: Pictures, questions: AskedWords | None) -> dict[str, NDArray[np.generic]]:
    """Return what a graph is given beside a model's tensors, n rows each, by input."""
    return {"image": images} if questions is None else {"image": images, INPUT: questions}


def graph_scores(
    session: onnxruntime.InferenceSession,
    tensors: Arrays,
    images: Pictures,
    batch: int,
    questions: AskedWords | None = None,
) -> Arrays:
    """Return what the graph says of these images, or to these questions.

    Args:
        tensors: values of its other inputs; those it does not take are ignored.

    Returns:
        Outputs by name, n rows each.
    """
    names = [value.name for value in session.get_outputs()]
    given = network_inputs(images, questions)
    fixed = {value.name: tensors[value.name] for value in session.get_inputs() if value.name not in given}
    parts = [
        session.run(names, {**{name: one[start : start + batch] for name, one in given.items()}, **fixed})
        for start in range(0, len(images), batch)
    ]
    return {name: np.concatenate([part[index] for part in parts]) for index, name in enumerate(names)}


def compare(expected: Arrays, found: Arrays, batch: int) -> list[Parity]:
    """Return the largest difference of each quantity.

    Returns:
        One figure for each quantity of `expected`; infinite where an output is missing, misshapen or not finite.
    """
    figures = []
    for name, wanted in expected.items():
        got = found.get(name)
        worst = float("inf")
        if got is not None and got.shape == wanted.shape and np.isfinite(got).all() and np.isfinite(wanted).all():
            difference = np.abs(got.astype(np.float64) - wanted)
            if name == "shown":
                difference = difference[_same_class(expected, found)]
            scale = 1 + np.abs(wanted) if name == "evidence" else 1.0
            worst = float((difference / scale).max(initial=0.0))
        figures.append(Parity(name, worst, TOLERANCES[name], batch))
    return figures


def _same_class(expected: Arrays, found: Arrays) -> NDArray[np.bool_]:
    wanted, got = expected["probabilities"], found["probabilities"]
    return np.asarray(wanted.argmax(axis=1) == got.argmax(axis=1))


def compare_occlusion(
    session: onnxruntime.InferenceSession,
    module: ScoreModule | AnswerModule,
    tensors: Arrays,
    images: Pictures,
    cells: int,
    questions: AskedWords | None = None,
) -> Parity:
    """Return the largest difference between the trainer's and the graph's occlusion maps of the likeliest class."""
    worst, batch = 0.0, BATCHES[-1]
    for index, image in enumerate(images):
        pictures = np.concatenate([image[None], each_cell_hidden(image, cells)])
        asked = None if questions is None else np.repeat(questions[index][None], len(pictures), axis=0)
        wanted = trainer_scores(module, tensors, pictures, questions=asked)["probabilities"]
        got = graph_scores(session, tensors, pictures, batch, asked)["probabilities"]
        label = int(wanted[0].argmax())
        maps = [occlusion_map(float(one[0, label]), one[1:, label]) for one in (wanted, got)]
        worst = max(worst, float(np.abs(maps[0] - maps[1]).max()))
    return Parity("occlusion", worst, TOLERANCES["occlusion"], batch)


def check_parity(
    graph: bytes,
    module: ScoreModule | AnswerModule,
    tensors: Arrays,
    images: Pictures | None = None,
    cells: int | None = None,
    questions: AskedWords | None = None,
) -> list[Parity]:
    """Run the gates.

    Args:
        images: at least 64 pictures (n, S, S, 3); drawn ones by default.
        questions: what is asked about each, of a model that answers questions.
        cells: of the occlusion map that is shown; None where none is.

    Raises:
        GateError: too few images, or a figure beyond its gate; the sentence names the worst.
    """
    pictures = parity_images(module.backbone.spec.image_px) if images is None else images
    if len(pictures) < MIN_IMAGES:
        raise GateError(f"the gates need {MIN_IMAGES} images, but {len(pictures)} were given")
    session = open_session(graph)
    expected = trainer_scores(module, tensors, pictures, questions=questions)
    figures = [
        figure
        for batch in BATCHES
        for figure in compare(expected, graph_scores(session, tensors, pictures, batch, questions), batch)
    ]
    if cells is not None:
        last = None if questions is None else questions[-OCCLUDED:]
        figures.append(compare_occlusion(session, module, tensors, pictures[-OCCLUDED:], cells, last))
    failed = [figure for figure in figures if not figure.passed]
    if failed:
        worst = max(failed, key=lambda figure: figure.worst / figure.allowed)
        raise GateError(
            f"{worst.quantity} of the graph differs from the trainer by {worst.worst:.2e} at batch {worst.batch}, "
            f"and at most {worst.allowed:.0e} is allowed; no bundle is made: try the versions in constraints.txt"
        )
    return worst_of(figures)


def worst_of(figures: Sequence[Parity]) -> list[Parity]:
    """Return the worst figure of each quantity, in the order they first appear."""
    return [
        max((figure for figure in figures if figure.quantity == name), key=lambda figure: figure.worst)
        for name in dict.fromkeys(figure.quantity for figure in figures)
    ]
