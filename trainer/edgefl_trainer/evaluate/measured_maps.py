"""Measure how true each map is that a device could show: hide what it marks, and look whether the answer changes.

Every candidate of `models.shown_maps` and occlusion are made for the same pictures and judged against the same random
quarters (`rules.hidden_regions`, `evaluate.map_truth`). Of a model that answers questions the candidates are the
attention of its class token and occlusion; each picture is asked its own question, whatever is hidden of it. The map
that travels is measured too; where the head does not read the class token, no device shows it. Guarantees: same model
and pictures, same figures, whatever was drawn before. docs/methods.md 1.8; docs/decisions/0040.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from edgefl_protocol.bundle.shown_map import WAYS, MapKind, ShownMap
from edgefl_protocol.rules import hidden_regions as regions
from edgefl_protocol.sentences import counted, duration
from edgefl_trainer.contract import Predictor
from edgefl_trainer.evaluate.looking import answers_to
from edgefl_trainer.evaluate.map_truth import (
    LEAST_PICTURES,
    Changes,
    InLesion,
    MapTruth,
    chosen,
    in_lesion,
    judged,
    not_measured,
)
from edgefl_trainer.evaluate.metrics import predicted_classes
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.shown_maps import attention_map, graph_maps, patch_features, share_map
from edgefl_trainer.models.spec import ViTSpec
from edgefl_trainer.models.vit import ViTOutput
from edgefl_trainer.rollout import rollout_from_factors

TRAVELS = "travels"  # the class token's rollout, where the head reads something else
OCCLUDED_SIDE = 7  # cells along one side where the patches are too many
MOST_OCCLUDED = 64  # patches that are hidden one by one
MOST_GFLOP = 500  # of a device for one occlusion map: 1.5 s where a ViT-S/16 takes 29 ms
MEASURED_GFLOP = 10_000  # for a table: some 20 s on two cores
MOST_PICTURES = 96
EVERY_S = 10.0  # between two lines about one step
SEED = 0  # of no run: the same model and pictures give the same figures
BATCH = 64

Images = UInt8[np.ndarray, "n S S 3"]
Rows = Int[np.ndarray, " n"]
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MapTable:
    """What was found of every map of one model."""

    maps: Mapping[str, MapTruth]  # by kind; `TRAVELS` is no candidate
    cells: int | None  # of the occlusion map; None where a device would take too long for it
    pictures: int  # with an answer, on which it was found

    def to_json(self) -> dict[str, Any]:
        """Give the value of a site under `maps` of `edgefl-train evaluate --json`."""
        maps = {
            kind: {
                "advantage": asdict(one.advantage),
                "hidden": {way: asdict(effect) for way, effect in one.hidden.items()},
                "better_than_chance": one.better_than_chance,
                "in_lesion": None if one.in_lesion is None else asdict(one.in_lesion),
            }
            for kind, one in self.maps.items()
        }
        return {"pictures": self.pictures, "shown": self.shown.to_json(), "maps": maps}

    @property
    def shown(self) -> ShownMap:
        """The map that a device shows."""
        found: dict[MapKind, MapTruth] = {kind: one for kind, one in self.maps.items() if kind != TRAVELS}  # type: ignore[misc]
        return chosen(found, self.cells) if self.pictures else not_measured("few_pictures")


class _Judge(Protocol):
    """What is measured: answers of a model, and the maps behind them.

    Images come with the rows that they are made of: a model that answers questions asks each its own.
    """

    def answers(self, images: Images, rows: Rows) -> tuple[Float[np.ndarray, "n K"], Int[np.ndarray, " n"]]:
        """Give probabilities, and the class that is named, -1 for none."""

    def maps(self, images: Images, rows: Rows) -> dict[str, Float[np.ndarray, "n N"]]:
        """Make every map that a graph can give, by kind; none of a convolutional network."""

    def gflop(self, image_px: int) -> float:
        """Count the work of one picture, in 10⁹ operations."""

    @property
    def kinds(self) -> int:
        """How many candidates a graph gives."""


@dataclass
class _Asked:
    """A model that answers questions: one about each row's picture."""

    predictor: Predictor
    tokens: Int[np.ndarray, "n L"]
    device: torch.device

    kinds: ClassVar[int] = 1

    def answers(self, images: Images, rows: Rows) -> tuple[Float[np.ndarray, "n K"], Int[np.ndarray, " n"]]:
        """Give probabilities, and the answer that is named."""
        probabilities = self._run(images, rows)["probabilities"]
        return probabilities, predicted_classes(probabilities, None, self.predictor.seen)

    def maps(self, images: Images, rows: Rows) -> dict[str, Float[np.ndarray, "n N"]]:
        """Make the map that the graph gives: the attention of the class token."""
        return {"attention": self._run(images, rows)["map"]}

    def gflop(self, image_px: int) -> float:
        """Count the work of one picture, in 10⁹ operations."""
        with FlopCounterMode(display=False) as counter:
            self._run(np.zeros((1, image_px, image_px, 3), dtype=np.uint8), np.zeros(1, dtype=np.int64))
        return float(counter.get_total_flops()) / 1e9

    def _run(self, images: Images, rows: Rows) -> dict[str, NDArray[np.float32]]:
        return answers_to(self.predictor, images, self.tokens[rows], self.device)


@dataclass
class _Model:
    """A model that scores pictures."""

    predictor: Predictor
    device: torch.device
    tensors: dict[str, torch.Tensor] = field(init=False)
    module: ScoreModule = field(init=False)

    def __post_init__(self) -> None:
        made = self.predictor.score_module
        kinds = graph_maps(made.backbone, made.options.readout)
        self.module = ScoreModule(made.backbone, made.options, "values" if kinds else None).to(self.device).eval()
        self.tensors = {n: torch.from_numpy(np.array(v)).to(self.device) for n, v in self.predictor.tensors.items()}

    @property
    def kinds(self) -> int:
        """How many candidates a graph gives."""
        return len(graph_maps(self.module.backbone, self.module.options.readout))

    def answers(self, images: Images, rows: Rows) -> tuple[Float[np.ndarray, "n K"], Int[np.ndarray, " n"]]:
        """Give probabilities, and the class that is named, -1 for none."""
        parts = [self._judged(images[start : start + BATCH]) for start in range(0, len(images), BATCH)]
        probabilities = np.concatenate([one for one, _ in parts])
        vacuities = [one for _, one in parts if one is not None]
        vacuity = np.concatenate(vacuities) if vacuities else None
        return probabilities, predicted_classes(probabilities, vacuity, self.predictor.seen)

    def _judged(self, images: Images) -> tuple[Float[np.ndarray, "n K"], Float[np.ndarray, " n"] | None]:
        with torch.inference_mode():
            batch = torch.from_numpy(np.ascontiguousarray(images)).to(self.device)
            output = self.module.output(batch, self.tensors, need_attention=False)
            score = self.module.judge(self.module.features(output, self.tensors), self.tensors, None)
        return score.probabilities.cpu().numpy(), None if score.vacuity is None else score.vacuity.cpu().numpy()

    def maps(self, images: Images, rows: Rows) -> dict[str, Float[np.ndarray, "n N"]]:
        """Make every map that a graph can give, by kind; none of a convolutional network."""
        parts = [self._maps(images[start : start + BATCH]) for start in range(0, len(images), BATCH)]
        return {kind: np.concatenate([part[kind] for part in parts]) for kind in parts[0]}

    def _maps(self, images: Images) -> dict[str, Float[np.ndarray, "n N"]]:
        kinds, options = graph_maps(self.module.backbone, self.module.options.readout), self.module.options
        if not kinds:
            return {}
        with torch.inference_mode():
            batch = torch.from_numpy(np.ascontiguousarray(images)).to(self.device)
            output = self.module.output(batch, self.tensors, need_attention=True)
            assert isinstance(output, ViTOutput)  # it has maps
            found = {"rollout" if "rollout" not in kinds else TRAVELS: rollout_from_factors(output.factors)}
            for kind in kinds:
                if kind == "share":
                    score = self.module.judge(self.module.features(output, self.tensors), self.tensors, None)
                    features = patch_features(output, self.module.vit.vit.fc_norm)
                    rows = self.tensors["head.weight"][score.probabilities.argmax(dim=-1)]
                    found[kind] = share_map(self.module.standardised(features, self.tensors), rows)
                else:
                    found[kind] = attention_map(kind, output, options.readout)
        return {kind: value.float().cpu().numpy() for kind, value in found.items()}

    def gflop(self, image_px: int) -> float:
        """Count the work of one picture, in 10⁹ operations."""
        with FlopCounterMode(display=False) as counter:
            self._judged(np.zeros((1, image_px, image_px, 3), dtype=np.uint8))
        return float(counter.get_total_flops()) / 1e9


def occlusion_cells(backbone: Backbone) -> int:
    """Count the cells that an occlusion hides: the patches, or a grid of 7 by 7 where these are many or none."""
    spec = backbone.spec
    return spec.tokens if isinstance(spec, ViTSpec) and spec.tokens <= MOST_OCCLUDED else OCCLUDED_SIDE**2


def measure_maps(
    predictor: Predictor,
    images: Images,
    lesions: Sequence[str],
    *,
    questions: Int[np.ndarray, "n L"] | None = None,
    masks: UInt8[np.ndarray, "n S S"] | None = None,
    device: torch.device | None = None,
    report: Report = lambda line: None,
) -> MapTable:
    """Measure every map of a model.

    Args:
        images: as the network takes them, none that it was trained on, in any order; of many the first are taken.
        lesions: of each picture, for the intervals.
        questions: words of what is asked about each picture; None for a model that scores pictures.
        masks: not 0 in the lesion, where outlines are known.
    """
    where = device or torch.device("cpu")
    model: _Judge = _Model(predictor, where) if questions is None else _Asked(predictor, questions, where)
    backbone = predictor.module.backbone
    cells, work = occlusion_cells(backbone), model.gflop(backbone.spec.image_px)
    passes = 1 + 2 * len(WAYS) * (regions.RANDOM_QUARTERS + 1 + model.kinds)
    occludes = work * (cells + 1) <= MOST_GFLOP
    passes += (cells + 2 * len(WAYS)) * occludes
    most = int(min(MOST_PICTURES, max(LEAST_PICTURES, MEASURED_GFLOP // (work * passes))))
    taken = np.arange(min(most, len(images)))
    report(
        f"measuring how true its maps are: {counted(len(taken), 'picture')}, {counted(passes, 'pass', 'passes')} each …"
    )
    if not len(taken):
        return MapTable(maps={}, cells=cells if occludes else None, pictures=0)
    probabilities, named = model.answers(images[taken], taken)
    taken = taken[named >= 0]  # the others have no answer that could change
    probabilities, named = probabilities[named >= 0], named[named >= 0]
    if not len(taken):
        return MapTable(maps={}, cells=cells if occludes else None, pictures=0)
    pictures = np.ascontiguousarray(images[taken])
    maps = model.maps(pictures, taken)
    if occludes:
        maps["occlusion"] = _occlusion(model, (pictures, taken), probabilities, named, cells, report)
    sizes = len({value.shape[1] for value in maps.values()})
    times = 2 * len(WAYS) * (regions.RANDOM_QUARTERS * sizes + len(maps))
    hiding = _Hiding(model, pictures, taken, named, _Steps(times, "hiding quarters of all pictures", report))
    outlines = None if masks is None else masks[taken] > 0
    own = [lesions[index] for index in taken.tolist()]
    found = {}
    for kind, value in maps.items():
        found[kind] = hiding.truth(value, own, outlines)
        report(f"map {kind}: advantage over a random map {found[kind].advantage.value:.2f}")
    return MapTable(maps=found, cells=cells if occludes else None, pictures=len(taken))


def _occlusion(
    model: _Judge,
    shown: tuple[Images, Rows],
    probabilities: Float[np.ndarray, "n K"],
    named: Int[np.ndarray, " n"],
    cells: int,
    report: Report,
) -> Float[np.ndarray, "n N"]:
    rows = []
    pictures, own = shown
    steps = _Steps(len(pictures), "occlusion, picture by picture", report)
    for index, picture in enumerate(pictures):
        without, _ = model.answers(regions.each_cell_hidden(picture, cells), np.full(cells, own[index]))
        label = named[index]
        rows.append(regions.occlusion_map(float(probabilities[index, label]), without[:, label]))
        steps.done()
    return np.stack(rows)


class _Steps:
    """Tells how far a long step is, and the time left: when it begins, and every ten seconds."""

    def __init__(self, total: int, what: str, report: Report) -> None:
        self._total, self._what, self._report, self._number = total, what, report, 0
        self._begun = self._told = monotonic()
        report(f"{what}: {counted(total, 'step')} …")

    def done(self) -> None:
        """Count one."""
        self._number, now = self._number + 1, monotonic()
        if now - self._told >= EVERY_S and self._number < self._total:
            self._told = now
            left = duration((now - self._begun) * (self._total - self._number) / self._number)
            self._report(f"{self._what}: {self._number} of {self._total}, {left} left")


class _Hiding:
    """Pictures, what covers them, and what hiding random quarters does to their answers."""

    def __init__(
        self, model: _Judge, pictures: Images, rows: Rows, named: Int[np.ndarray, " n"], steps: _Steps
    ) -> None:
        self._steps = steps
        self._model, self._pictures, self._rows, self._named = model, pictures, rows, named
        self._covers = {"mean": regions.mean_colours(pictures), "blur": regions.blurred(pictures)}
        self._random: dict[int, dict[str, tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]]] = {}

    def _changed(self, cells: Bool[np.ndarray, "n N"], way: str) -> Float[np.ndarray, " n"]:
        _, named = self._model.answers(regions.hidden(self._pictures, cells, self._covers[way]), self._rows)
        self._steps.done()
        return np.asarray(named != self._named, dtype=np.float64)

    def _by_chance(self, cells: int) -> dict[str, tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]]:
        """Find for each way what hiding a random quarter does, and all but one."""
        if cells not in self._random:
            rng = np.random.default_rng(SEED)
            drawn = [regions.random_cells(len(self._pictures), cells, rng) for _ in range(regions.RANDOM_QUARTERS)]
            self._random[cells] = {
                way: (
                    np.mean([self._changed(one, way) for one in drawn], axis=0),
                    np.mean([self._changed(~one, way) for one in drawn], axis=0),
                )
                for way in WAYS
            }
        return self._random[cells]

    def truth(
        self, maps: Float[np.ndarray, "n N"], lesions: Sequence[str], outlines: Bool[np.ndarray, "n S S"] | None
    ) -> MapTruth:
        """Judge one map."""
        marked = regions.strongest_cells(maps, np.random.default_rng(SEED))
        chance = self._by_chance(maps.shape[1])
        changes = {
            way: Changes(
                marked=self._changed(marked, way),
                random=chance[way][0],
                kept=self._changed(~marked, way),
                kept_random=chance[way][1],
            )
            for way in WAYS
        }
        return judged(changes, lesions, None if outlines is None else _in_lesion(maps, marked, outlines))


def _in_lesion(
    maps: Float[np.ndarray, "n N"], marked: Bool[np.ndarray, "n N"], outlines: Bool[np.ndarray, "n S S"]
) -> InLesion | None:
    side_px, grid = outlines.shape[1], regions.grid_side(maps.shape[1])
    strongest = [divmod(int(row.argmax()), grid) for row in maps]
    places = [
        ((2 * row + 1) * side_px // (2 * grid), (2 * column + 1) * side_px // (2 * grid)) for row, column in strongest
    ]
    return in_lesion(regions.pixels_of(marked, side_px), places, outlines)
