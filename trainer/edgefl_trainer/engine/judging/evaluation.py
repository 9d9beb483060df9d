"""Score a finished run's models on other rows than those of the run itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import counted, listed
from edgefl_trainer.data import DataError, Federation, load_federation
from edgefl_trainer.data.class_numbers import in_classes
from edgefl_trainer.data.partitions.partition import PARTITION_FILE, Partition, read_partition
from edgefl_trainer.data.questions import Vocabulary
from edgefl_trainer.data.site_rows import REPORTED
from edgefl_trainer.data.sources.foreign import read_foreign
from edgefl_trainer.data.specs import asks_questions
from edgefl_trainer.engine.display import warn
from edgefl_trainer.engine.judging.held_out import federation_figures
from edgefl_trainer.engine.judging.own_data import own_data
from edgefl_trainer.engine.judging.results import score
from edgefl_trainer.engine.models import FinishedRun, predict
from edgefl_trainer.engine.sites import choose_device, examples_of
from edgefl_trainer.errors import RunError
from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.measured_maps import measure_maps
from edgefl_trainer.evaluate.metrics import entropy_nats, out_of_distribution_auroc
from edgefl_trainer.evaluate.no_round import part_lines
from edgefl_trainer.evaluate.site_figures import thin_sites
from edgefl_trainer.evaluate.tables.shares import SIZES
from edgefl_trainer.evaluate.undefined import HEAD_STAYS, without_head

KEPT = (
    "method", "task", "seed", "rounds", "preset", "select", "labels", "mode", "pretraining", "travels",
    "settings_sha256", "images_per_second", "wait_share", *SIZES, *SIZES.values(),
)  # fmt: skip
KEPT_OF_SITES = (
    "n_train", "n_tune", "n_labelled", "learned_images", "learned_lesions", "held_out", "readout", "classes_tuned",
    "selected_round", "selected_phase", "took_part",
)  # fmt: skip


def evaluate(
    run: FinishedRun,
    data: Sequence[str],
    device: str = "auto",
    foreign: Sequence[str] = (),
    maps: Callable[[str], None] | None = None,
    site: str | None = None,
) -> dict[str, Any]:
    """Judge each site's model on that site's `test` rows of the data, else on its `val` rows.

    All pictures of a source without splits are `test` rows where the run learned from none of them, by their pixels and
    by the names of images and lesions at a site. Gives the keys of
    `summary.json` without bytes and seconds, `reported_rows`, `rows_learned_from` (those of them that the run learned
    from or was tuned on; null where that cannot be told), `labelled` (rows of the judged sites that could be judged),
    and `sites_without_model`: sites of the data that are not judged; with foreign pictures `ood`. A site that is judged
    with another's model has `n_train` 0.

    Args:
        data: SPECs; their sites are matched by name.
        site: of the run, whose model judges all sites of the data; None judges each with its own (`model_of`).
        foreign: sources of pictures that are not of the task, see `data.foreign`.
        maps: told how far the measurement of maps is, which adds `maps` by site; None leaves them out.

    Raises:
        DataError: the data cannot be read or names classes the run does not know.
        RunError: no site of the data has a model in the run.
    """
    _check_models(run, site)
    federation, learned = _data_to_judge(run, data, site, pictures_alone=bool(foreign) or maps is not None)
    for line in federation.warnings if federation.questions is not None else ():  # of pictures, `run` told
        warn(line)
    federation = in_classes(
        federation, run.classes, whose="the run", advice="choose other data, or train with this class."
    )
    where = choose_device(device)
    known = _models_of(run, federation, site)
    without = [name for name in federation.sites if name not in known]
    for line in _not_judged(run, without):
        warn(line)
    scored, facts, seen = _score_sites(run, federation, known, where)
    for line in thin_sites(scored, seen, run.classes, federation.report_split):
        warn(line)
    trained = {name: model for name, model in known.items() if not facts[name].get("held_out")}
    further = {way: federation_figures(*_score_sites(run, federation, trained, where, way)[:2]) for way in run.further}
    return {
        **{key: run.summary[key] for key in (*KEPT, "backbone_sha256", "taught_pictures") if key in run.summary},
        "partition_sha256": federation.partition_sha256,
        "reported_rows": federation.report_split,
        "classes": list(run.classes),
        "rows_learned_from": learned,
        "labelled": sum(_labelled(federation, name) for name in known),
        **({"model_of": site} if site is not None else {}),
        **federation_figures(scored, facts),
        **({"further": further} if further else {}),
        **({"maps": map_tables(run, federation, known, where, maps)} if maps is not None else {}),
        "sites_without_model": without,
        **({"ood": foreign_figures(run, foreign, scored, known, where)} if foreign else {}),
        "state_sha256": run.summary["state_sha256"],
    }


def _not_judged(run: FinishedRun, names: Sequence[str]) -> list[str]:
    """Say of which sites of the data the run has no model, and why where the run itself kept them out of training."""
    apart = [name for name in names if without_head(run.summary["sites"].get(name, {}))]
    others = [name for name in names if name not in apart]
    said = (
        [f"the run has no model of {', '.join(others)}: not judged; --site NAME judges all of the data with one model"]
        if others
        else []
    )
    if apart:
        said.append(f"the run has no model of {', '.join(apart)}, held out: {HEAD_STAYS}; not judged")
    return said


def _score_sites(
    run: FinishedRun,
    federation: Federation,
    models: Mapping[str, str],
    device: torch.device,
    further: str = "",
) -> tuple[dict[str, Scored], dict[str, dict[str, Any]], dict[str, Sequence[bool]]]:
    """Of these sites the scored rows, what of the model's site stays, and the classes each can name.

    `models` is which site's model judges a site of the data.
    """
    scored: dict[str, Scored] = {}
    seen: dict[str, Sequence[bool]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        rows = federation.sites[name].rows(federation.report_split).astype(np.int64)
        own = (run.summary["further"][further] if further else run.summary)["sites"][model]
        facts[name] = {key: own[key] for key in KEPT_OF_SITES if key in own and (name == model or key != "took_part")}
        if name != model:
            facts[name] |= {"n_train": 0, "n_labelled": 0}  # it learned nothing: the model is another site's
        predictor = run.predictor(model, further)
        seen[name] = predictor.seen
        facts[name]["classes_learned"] = sum(map(bool, predictor.seen))
        if not further:  # a further model's threshold is not kept
            facts[name]["refer_above"] = float(run.calibration["sites"][model]["refer_above"])
        scored[name] = score(predictor, examples_of(federation, rows), federation, name, device)
    return scored, facts, seen


def map_tables(
    run: FinishedRun,
    federation: Federation,
    models: Mapping[str, str],
    device: torch.device,
    report: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Measure how true every map of each site's model is, on reported rows; see `MapTable.to_json`."""
    found = {}
    for name, model in models.items():
        rows = np.random.default_rng(run.settings.seed).permutation(
            federation.sites[name].rows(federation.report_split).astype(np.int64)
        )
        table = measure_maps(
            run.predictor(model),
            federation.images[federation.places(rows)],
            [federation.lesions[row] for row in rows],
            masks=None if federation.masks is None else federation.masks[rows],
            device=device,
            report=lambda line, site=name: report(f"{site}: {line}"),  # type: ignore[misc]  # bound by its default
        )
        found[name] = table.to_json()
    return found


def _check_models(run: FinishedRun, site: str | None) -> None:
    """Refuse a run, or a site of it, without a model, and warn of a site that learned nothing, before data is read."""
    if not run.sites:
        raise RunError(
            f"the run in {run.folder} learned a backbone and has no model to judge: name a run that uses it."
        )
    if site is None:
        return
    run.predictor(site)
    for line in part_lines({"sites": {site: run.summary["sites"][site]}}):
        warn(line)


def _models_of(run: FinishedRun, federation: Federation, site: str | None) -> dict[str, str]:
    """Which site's model judges each site of the data; a `RunError` where none has a model."""
    if site is not None:
        return dict.fromkeys(federation.sites, site)
    if found := {name: name for name in federation.sites if name in run.sites}:
        return found
    raise RunError(
        f"no site of the data ({listed(list(federation.sites))}) has a model in {run.folder}, which has "
        f"{listed(run.sites)}: --site NAME judges all of the data with the model of one of these."
    )


def _labelled(federation: Federation, name: str) -> int:
    """Count the rows of a site that have a label, whatever their split."""
    site = federation.sites[name]
    return sum(int((federation.labels[site.rows(kind)] != -1).sum()) for kind in ("train", "tune", *REPORTED))


def _data_to_judge(
    run: FinishedRun, data: Sequence[str], site: str | None, *, pictures_alone: bool
) -> tuple[Federation, int | None]:
    """Data to judge a run on, and of how many of its judged pictures the run learned; None where that cannot be told.

    Sources without splits are judged whole; where the run learned from one of these pictures or lesions, or that cannot
    be told, they are dealt as a run deals them, so that what it learned from is not judged.
    """
    own = _own_data(run)
    again, lesions = list[str](), 0
    for all_test in (True, False):
        federation = _read_data(run, data, site, pictures_alone=pictures_alone, all_test=all_test)
        known = _models_of(run, federation, site)
        judged = [row for name in known for row in federation.sites[name].rows(federation.report_split)]
        images = federation.images[np.unique(federation.places(judged))]
        learned = None if own is None else own.learned_among(images)
        if own is not None and run.questions is None:  # of questions, each names its picture
            again, lesions = own.lesions_learned_among(federation, known)
        if learned == 0 and not again:
            break
    if learned:
        warn(
            f"{learned} of these {len(images)} pictures, by their pixels, are among those that the run learned from or "
            f"was tuned on: the figures are too high{_drawn_of_questions(run)}"
        )
    if again:
        warn(
            f"of {lesions} lesions that are judged on, {counted(len(again), 'lesion has', 'lesions have')} the name of "
            "a lesion or an image that the same site learned from or was tuned on in the run, such as "
            f"{again[0]}: the figures hold for new lesions only where these are other ones"
        )
    return federation, learned


def _drawn_of_questions(run: FinishedRun) -> str:
    """Say why a run may have learned from fewer pictures than its data's training questions show; else nothing."""
    most = run.settings.images_per_site
    if run.questions is None or not most:
        return ""
    return (
        f"; of a site's training questions it drew at most {most:,}, so it may have learned from fewer pictures "
        "than they show"
    )


def _read_data(
    run: FinishedRun, data: Sequence[str], site: str | None, *, pictures_alone: bool, all_test: bool
) -> Federation:
    """Data to judge a run on, with its classes, or its answers and words; it may lack some that the run's task names.

    A `DataError` where the run answers questions and the data asks none, or the reverse; a `RunError` where it answers
    questions and what is asked for judges `pictures_alone`.
    """
    if run.questions is not None and pictures_alone:
        raise RunError(
            "the models of this run answer questions: leave --ood and --maps out, which judge pictures alone."
        )
    asking = any(map(asks_questions, data))
    if asking != (run.questions is not None):
        kinds = ("pictures alone", "questions about pictures")
        raise DataError(
            f"The run in {run.folder} learned from {kinds[not asking]}, and the data holds {kinds[asking]}: "
            "name data of the run's kind."
        )
    return load_federation(
        data,
        image_px=run.backbone.spec.image_px,
        colour=run.settings.colour,
        task=run.settings.task,
        whole_task=False,
        classes=run.settings.classes or None,
        seed=run.settings.seed,
        partition=None if site is not None else _partition_of(run),
        vocabulary=None if run.questions is None else Vocabulary(run.classes, run.questions),
        all_test=all_test,
        made_like=run.preprocess.taught,
    )


def _own_data(run: FinishedRun) -> Federation | None:
    """Read what the run learned from; None, with a warning, where that is no more to be had."""
    try:
        return own_data(run)
    except EdgeflError as error:
        warn(f"the run's own data cannot be compared ({error}): whether it learned from these pictures is open")
        return None


def _partition_of(run: FinishedRun) -> Partition | None:
    """Who has which image, where the run's sites are not those of the data."""
    path = run.folder / PARTITION_FILE
    partition = read_partition(path) if path.exists() else None
    return partition if partition is not None and partition.plan.scheme != "natural" else None


def foreign_figures(
    run: FinishedRun,
    sources: Sequence[str],
    scored: Mapping[str, Scored],
    models: Mapping[str, str],
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Measure how well each site's uncertainty tells its reported rows from foreign pictures (`read_foreign`).

    Gives for each source `images`, `auroc` by site (null where a site has no reported row), `mean_auroc` and
    `worst_auroc`. A `DataError` where a source cannot be used.
    """
    found = {}
    for source in sources:
        images = read_foreign(source, run.backbone.spec.image_px, run.settings.colour, run.preprocess.taught)
        areas = {}
        for name in sorted(scored):
            scores = predict(run.predictor(models[name]), images, device)
            outside = entropy_nats(scores.probabilities) if scores.vacuity is None else scores.vacuity
            areas[name] = out_of_distribution_auroc(scored[name].uncertainty, outside)
        known = [area for area in areas.values() if area is not None]
        found[source] = {
            "images": len(images),
            "auroc": areas,
            "mean_auroc": float(np.mean(known)) if known else None,
            "worst_auroc": min(known) if known else None,
        }
    return found
