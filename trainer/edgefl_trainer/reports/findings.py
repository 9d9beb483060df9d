"""How well a run does: figures of each site with intervals, recalls, and which class is taken for which."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edgefl_protocol.sentences import capital
from edgefl_trainer.evaluate.answer_figures import PARTS, USUAL
from edgefl_trainer.evaluate.chance import chance_of
from edgefl_trainer.evaluate.metrics import METRIC_WORDS
from edgefl_trainer.evaluate.no_round import MARK as ABSENT
from edgefl_trainer.evaluate.no_round import in_no_round
from edgefl_trainer.evaluate.one_class import FEWER, FEWER_SAYS, MARK, SAYS, mark_of
from edgefl_trainer.evaluate.undefined import why_undefined
from edgefl_trainer.reports.blocks import (
    NOT_RECORDED,
    UNDEFINED,
    Beside,
    Form,
    ReportBlock,
    ReportCell,
    ReportTable,
    Section,
    Words,
    figure,
    found_at,
    written,
)
from edgefl_trainer.reports.curves import MOST_PANELS
from edgefl_trainer.reports.origins import left_out, shown_sites
from edgefl_trainer.reports.run_facts import RunFacts

OF_PICTURES: Mapping[str, Form] = {
    "balanced_accuracy": "share", "accuracy": "share", "specificity": "share", "auroc": "number", "ece": "number",
    "brier": "number", "aurc": "number",
}  # fmt: skip
OF_ANSWERS: Mapping[str, Form] = {f"accuracy{part}": "share" for part in PARTS}
SHORT = {"auroc": "AUROC", "aurc": "AURC", "ece": "ECE", "brier": "Brier score"}


def in_short(facts: RunFacts) -> list[tuple[str, ReportCell]]:
    """Pick the few facts at the top of a run's part."""
    summary = facts.summary
    trained = [site for site in facts.sites.values() if not site.get("held_out")]
    pictures = sum(site.get("n_train") or 0 for site in trained)
    told: list[tuple[str, ReportCell]] = [
        ("sites that trained", ReportCell(str(len(trained)))),
        ("training pictures", ReportCell(f"{pictures:,}")),
    ]
    lesions = [site.get("learned_lesions") for site in trained]
    if all(lesions):
        told.append(("lesions", ReportCell(f"{sum(map(sum, lesions)):,}")))  # type: ignore[arg-type]  # none is None
    if not facts.judged:
        return [*told, ("what was learned", ReportCell("a network, without labels"))]
    name = "accuracy" if USUAL in summary else "balanced_accuracy"
    for which, words in (("mean", "mean of sites"), ("worst", "worst site")):
        cell = figure(summary, (f"{which}_{name}",), strong=which == "mean")
        below = "; ".join(filter(None, [cell.below, _by_chance(summary, which, name)]))
        told.append((f"{words_of(name)}, {words}", replace(cell, below=below)))
    sent = summary.get("travels")
    told.append(("leaves a site", ReportCell(NOT_RECORDED if sent is None else ", ".join(sent) or "nothing")))
    return told


def _by_chance(summary: Mapping[str, Any], which: str, name: str) -> str:
    """Say what an answer that never changes gets, to stand below a figure: of questions the usual answer.

    Args:
        which: `mean` over sites, or that of the `worst`; a site of one class is in no chance.
    """
    if USUAL in summary:
        usual = summary[USUAL].get(f"{which}_{name}")
        return "" if usual is None else f"usual answer {written(usual, 'share')}"
    chance = chance_of([summary], name)
    if which == "mean":
        if chance.mean is None:
            return ""
        told, several = f"chance {written(chance.mean, 'share')}", summary.get("several_classes") or {}
        if (mean := several.get(f"mean_{name}")) is not None:  # a site of one class tells little of the mean above
            return f"sites with several classes: {written(mean, 'share')}, {told}"
        return f"{told} of sites with several classes" if several else told
    worst = summary.get(f"worst_{name}")
    found = [value for site, value in chance.sites.items() if summary["sites"][site].get(name) == worst]
    return f"chance {written(max(found), 'share')}" if found else ""


def figures_section(facts: RunFacts) -> Section:
    """Show the figures of each site, then over sites and over all rows together."""
    summary = facts.summary
    if not facts.judged:
        return Section(title="Figures", blocks=_probe(summary))
    forms = OF_ANSWERS if USUAL in summary else OF_PICTURES
    marks = {name: mark_at(facts, name) for name in shown_sites(facts)}
    rows = [_site_row(facts, name, forms, marks[name]) for name in shown_sites(facts)]
    main = next(iter(forms))
    over = {"mean": "mean of sites that trained", "worst": "worst of them"}
    rows += [
        [
            ReportCell(words, strong=True),
            ReportCell(""),
            *(
                figure(summary, (f"{which}_{name}",), form) if name == main else ReportCell("")
                for name, form in forms.items()
            ),
        ]
        for which, words in over.items()
    ]
    if "pooled" in summary:
        cells = [figure(summary, ("pooled", name), form) for name, form in forms.items()]
        rows.append(
            [
                ReportCell("all rows of them together", strong=True),
                figure(summary, ("pooled", "n_test"), "count"),
                *cells,
            ]
        )
    kept = found_at(summary, ("reported_rows",))
    caption = (
        f"Figures on {kept} rows, below them the 95 % interval: whole lesions drawn with replacement, 1,000 times. "
        "None stands where all draws give the same."
    )
    if forms is OF_PICTURES:
        caption += f" Lower is better: {', '.join(METRIC_WORDS[name] for name in ('ece', 'brier', 'aurc'))}."
    said = {MARK: SAYS, FEWER: FEWER_SAYS, ABSENT: "took part in no round"}
    notes: list[ReportBlock] = [
        Words(text=f"{mark} {words}.") for mark, words in said.items() if any(mark in each for each in marks.values())
    ]
    head = ("site", "pictures", *(capital(SHORT.get(name, words_of(name))) for name in forms))
    return Section(
        title="Figures", blocks=[ReportTable(head=head, rows=rows, caption=caption), *notes, *left_out(facts)]
    )


def _site_row(facts: RunFacts, name: str, forms: Mapping[str, Form], mark: str) -> list[ReportCell]:
    site, cells = facts.sites[name], []
    for place, (key, form) in enumerate(forms.items()):
        cell = figure(facts.summary, ("sites", name, key), form)
        if place == 0 and site.get(key) is None and key in site:
            cell = ReportCell(why_undefined({"n_test": 0, **site}, str(facts.summary.get("reported_rows", "reported"))))
        cells.append(cell)
    return [ReportCell(f"{name}{mark}"), figure(facts.summary, ("sites", name, "n_test"), "count"), *cells]


def mark_at(facts: RunFacts, name: str) -> str:
    """Return the marks of a site's figure: of one class, of fewer classes, of no round."""
    site = facts.sites[name]
    if site.get("balanced_accuracy") is None or USUAL in facts.summary:
        return ABSENT if name in in_no_round(facts.summary) else ""
    mark = mark_of(site, len(facts.summary.get("classes") or ()))
    return mark + (ABSENT if name in in_no_round(facts.summary) else "")


def words_of(metric: str) -> str:
    """Write the key of a figure as words."""
    return metric.replace("_", " ")


def _probe(summary: Mapping[str, Any]) -> list[ReportBlock]:
    """Of a learned network: what a linear probe makes of it."""
    probe = found_at(summary, ("probe",))
    if not isinstance(probe, dict):
        return [Words(text="No site has labelled rows, so nothing was judged.")]
    rows = [
        [ReportCell(name), *(figure(summary, ("probe", name, key)) for key in ("mean", "pooled"))]
        for name in sorted(probe)
    ]
    classes = len(summary.get("classes") or ())
    chance = (
        f" Chance is {written(1 / classes, 'share')} where a site's rows hold all {classes} classes." if classes else ""
    )
    return [
        Words(text="This run learned a network without labels. A linear probe on it is judged on tune rows."),
        ReportTable(
            head=("readout", "balanced accuracy, mean of sites", "all their rows together"),
            rows=rows,
            caption=f"No interval is kept of a probe.{chance}",
        ),
    ]


def recall_section(facts: RunFacts) -> Section | None:
    """Show the recall of each class at each site, and which is taken for which; None of answers and of a network."""
    summary, classes = facts.summary, list(facts.summary.get("classes") or ())
    if not facts.judged or USUAL in summary:
        return None
    names = [name for name in shown_sites(facts) if facts.sites[name].get("recall")]
    if not names:
        return Section(title="Recall of each class", blocks=[Words(text="Not recorded in this run.")])
    rows = []
    for where, path in [*((name, ("sites", name)) for name in names), ("all together", ("pooled",))]:
        cells = [_recall(summary, path, place) for place in range(len(classes))]
        rows.append([ReportCell(where, strong=where == "all together"), *cells])
    blocks: list[ReportBlock] = [
        ReportTable(
            head=("site", *classes),
            rows=rows,
            caption="Share of each class's pictures that is named rightly, its 95 % interval, and the number n of "
            "lesions. No interval stands below ten lesions, or where all or none are right.",
        ),
        *_confusions(facts, classes),
        *left_out(facts),
    ]
    return Section(title="Recall of each class", blocks=blocks)


def _recall(summary: Mapping[str, Any], path: tuple[str, ...], place: int) -> ReportCell:
    share, lesions, bounds = (
        found_at(summary, (*path, key, place)) for key in ("recall", "recall_lesions", "recall_interval")
    )
    if share is None or share == NOT_RECORDED:
        return ReportCell(UNDEFINED, (*path, "recall", place))
    told = [f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"] if isinstance(bounds, list) else []
    told += [] if lesions == NOT_RECORDED else [f"n = {lesions:,}"]
    return ReportCell(written(share, "share"), (*path, "recall", place), shade=share, below="; ".join(told))


def _confusions(facts: RunFacts, classes: Sequence[str]) -> list[ReportBlock]:
    """The confusion matrix of all sites together, then of each, where they are few."""
    found = facts.summary.get("confusion")
    if not found:
        return [Words(text="Which class is taken for which is not recorded in this run.")]
    pooled = np.sum([np.array(matrix) for matrix in found.values()], axis=0)
    blocks: list[ReportBlock] = [
        _matrix(pooled.tolist(), classes, "All sites together: pictures by true class (down) and answer (across).")
    ]
    if 1 < len(found) <= MOST_PANELS:
        blocks.append(Beside(tables=[_matrix(found[name], classes, name, name) for name in sorted(found)]))
    return blocks


def _matrix(matrix: Sequence[Sequence[int]], classes: Sequence[str], caption: str, site: str = "") -> ReportTable:
    answered = any(row[-1] for row in matrix)
    columns = len(classes) + answered
    rows = []
    for place, (name, row) in enumerate(zip(classes, matrix, strict=True)):
        whole = sum(row)
        cells = [
            ReportCell(
                f"{count:,}", ("confusion", site, place, to) if site else None, shade=count / whole if whole else 0.0
            )
            for to, count in enumerate(row[:columns])
        ]
        rows.append([ReportCell(f"{name} ({whole:,})"), *cells])
    head = ("true class", *classes, *(["no answer"] if answered else []))
    return ReportTable(head=head, rows=rows, caption=caption)
