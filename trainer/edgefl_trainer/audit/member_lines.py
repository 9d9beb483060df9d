"""The lines of membership: does a model tell which rows of a site it learned from?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgefl_trainer.audit.audited import Audited
from edgefl_trainer.audit.bounds import LEAST_UNITS, middle
from edgefl_trainer.audit.line import MEMBERSHIP, TRUE_POSITIVES, AuditLine, NotAttacked
from edgefl_trainer.audit.membership import Roc, confidences, lira_scores, loss_scores, memorised, roc
from edgefl_trainer.audit.pictures import Public, public_of
from edgefl_trainer.audit.reconstruction import thumbnails
from edgefl_trainer.contract import Predictor, Site
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.models import predict
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.evaluate.intervals import RESAMPLES, lesion_weights
from edgefl_trainer.learning.linear_probe import fit_predict

LEAST_ROWS: Final = 100  # on either side: below it 1 % of false positives is none
MOST_ROWS: Final = 600  # on either side
SMALL: Final = 28  # px a side of the pictures that the control memorises: more numbers than it has rows
PUBLIC: Final = 600
TOLD_APART: Final = 0.55  # target of docs/security.md 7, check 54
NEEDED: Final = 0.8  # area of the control
LOSS, LIRA = "loss", "LiRA with the other sites' models"


@dataclass(frozen=True)
class MemberRows:
    """Rows of a site that a model learned from, and as many that it did not."""

    pictures: np.ndarray  # uint8 (n, px, px, 3)
    targets: np.ndarray  # (n,)
    member: np.ndarray  # bool (n,)
    lesions: tuple[str, ...]


def membership_lines(
    audited: Audited, kind: str, models: Mapping[str, Predictor], without: Mapping[str, str]
) -> Iterator[AuditLine | NotAttacked]:
    """Infer membership from each attacked site's model.

    Args:
        models: of each site; those of the others are what LiRA compares with, where they are others.
        without: of sites that have none, why.
    """
    refused: dict[str, str] = {}
    attacked: dict[str, MemberRows] = {}
    parts: list[dict[str, Roc]] = []
    for name in audited.attacked:
        rows = member_rows(audited.federation, audited.sites[name], audited.run.settings.seed)
        if len(audited.sites) == 1:
            refused[name] = "there is no other site, and the floor is a model that learned from other sites alone"
        elif isinstance(rows, str):
            refused[name] = rows
        elif name not in models:
            refused[name] = without.get(name, f"{name} has no such model")
        else:
            audited.report(f"{kind}: membership, {name}")
            try:
                parts.append(_site_attacks(audited, name, rows, models))
            except ValueError as error:  # a score lacks a tensor, or has one of another shape
                refused[name] = f"the model of {name} cannot answer ({error})"
            else:
                attacked[name] = rows
    yield from (NotAttacked(kind, MEMBERSHIP, why, (name,)) for name, why in refused.items())
    if attacked:
        yield _line(kind, attacked, parts)


def _site_attacks(audited: Audited, name: str, rows: MemberRows, models: Mapping[str, Predictor]) -> dict[str, Roc]:
    """Attack the model of one site; the other sites' are its shadows, and their pictures are public."""
    shadows = [model for other, model in models.items() if other != name]
    others = [site for other, site in audited.sites.items() if other != name]
    public = public_of(audited.federation, others, PUBLIC, audited.run.settings.seed)
    return _attacks(audited.sites[name], rows, models[name], shadows, public, len(audited.federation.classes))


def member_rows(federation: Federation, site: Site, seed: int) -> MemberRows | str:
    """Draw rows that a site learned from, and reported ones; where there are too few, a clause that says so."""
    rng = np.random.default_rng([seed, 54])
    reported = report_rows(federation, site.name)
    parts = [rows.rows[rows.targets >= 0] for rows in (site.train, reported)]
    count = min(MOST_ROWS, *(len(part) for part in parts))
    if count < LEAST_ROWS:
        return (
            f"{site.name} has {len(parts[0])} training rows and {len(parts[1])} {federation.report_split} rows with a "
            f"label, and {LEAST_ROWS} of each are needed"
        )
    rows = np.concatenate([rng.permutation(part)[:count] for part in parts])
    return MemberRows(
        federation.images[federation.places(rows)],
        federation.labels[rows],
        np.arange(len(rows)) < count,
        tuple(federation.lesions[row] for row in rows),
    )


def _attacks(
    site: Site, rows: MemberRows, model: Predictor, others: Sequence[Predictor], public: Public, classes: int
) -> dict[str, Roc]:
    """Attack one model in each way, and the two models that figures are compared with.

    Gives for each the figures of the rows themselves first, then of each draw of lesions.
    """
    weights = np.concatenate([np.ones((1, len(rows.targets))), *lesion_weights(rows.lesions, RESAMPLES)])

    def judged(scores: np.ndarray) -> Roc:
        return roc(scores, rows.member, weights)

    def answers(one: Predictor) -> np.ndarray:
        return predict(one, rows.pictures, site.device).probabilities

    mine = answers(model)
    found = {LOSS: judged(loss_scores(mine, rows.targets))}
    shadows = [answers(one) for one in others if not _same(one, model)]
    if len(shadows) > 1:
        seen = np.stack([confidences(one, rows.targets) for one in shadows])
        found[LIRA] = judged(lira_scores(confidences(mine, rows.targets), seen))
    side = min(SMALL, rows.pictures.shape[1])
    small = thumbnails(rows.pictures, side)
    known = public.labels >= 0
    foreign = fit_predict(
        thumbnails(public.pictures[known], side), public.labels[known], small, classes, balanced=False
    )
    found["floor"] = judged(loss_scores(foreign, rows.targets))
    found["control"] = judged(loss_scores(memorised(small, rows.targets, rows.member, classes), rows.targets))
    return found


def _same(one: Predictor, other: Predictor) -> bool:
    """Whether two sites answer by one head: then neither is a model that did not learn from the other's rows."""
    name = "head.weight"
    return name in one.tensors and name in other.tensors and np.array_equal(one.tensors[name], other.tensors[name])


def _line(kind: str, attacked: Mapping[str, MemberRows], parts: Sequence[Mapping[str, Roc]]) -> AuditLine:
    """Average the sites' figures; of the two attacks the one that came farther, which favours the attacker."""
    shared = [name for name in (LOSS, LIRA) if all(name in part for part in parts)]
    area = {name: np.mean([part[name].area for part in parts], axis=0) for name in (*shared, "floor", "control")}
    measure = max(shared, key=lambda name: float(area[name][0]))
    tpr = np.mean([part[measure].tpr for part in parts], axis=0)
    minus_floor = area[measure] - area["floor"]  # in the same draws
    drawn = sum(len(set(rows.lesions)) for rows in attacked.values())
    enough = drawn >= LEAST_UNITS
    return AuditLine(
        kind=kind,
        attack=MEMBERSHIP,
        against="train rows beside reported rows of the same site, area under the ROC curve",
        measure=measure,
        figure=float(area[measure][0]),
        interval=middle(area[measure][1:]) if enough else None,
        floor=float(area["floor"][0]),
        floor_of="a model that learned from other sites alone",
        control=float(area["control"][0]),
        control_of="a model that memorises",
        needs=NEEDED,
        target=TOLD_APART,
        pictures=sum(len(rows.targets) for rows in attacked.values()),
        sites=tuple(attacked),
        more=dict(zip(TRUE_POSITIVES, (float(tpr[0]), *middle(tpr[1:])), strict=True)),
        drawn=drawn,
        drawn_of="lesion",
        minus_floor=float(minus_floor[0]),
        minus_floor_interval=middle(minus_floor[1:]) if enough else None,
    )
