"""What was learned, from whom, how and where: sections of a report that need no judged picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgefl_protocol.pictures.class_info import KNOWN
from edgefl_protocol.sentences import capital, counted
from edgefl_trainer.data.tasks import listed
from edgefl_trainer.engine.settings import without_folders
from edgefl_trainer.environment import all_environments
from edgefl_trainer.evaluate.tables.text import time_text
from edgefl_trainer.experiments.run_words import NO_PRESET, schedule
from edgefl_trainer.reports.blocks import (
    NOT_RECORDED,
    UNDEFINED,
    FactList,
    ReportBlock,
    ReportCell,
    ReportTable,
    Section,
    Words,
    figure,
    plain,
)
from edgefl_trainer.reports.described import Described, purpose, settings_of, value_text
from edgefl_trainer.reports.run_facts import RunFacts

MOST_ROWS = 200  # sites of a table; `summary.json` has all


def shown_sites(facts: RunFacts) -> list[str]:
    """Name the sites that tables show, in name order."""
    return sorted(facts.sites)[:MOST_ROWS]


def left_out(facts: RunFacts) -> list[ReportBlock]:
    """Say that a table does not show every site; nothing where it does."""
    more = len(facts.sites) - MOST_ROWS
    return [Words(text=f"{counted(more, 'more site')}, by name, stand in summary.json alone.")] if more > 0 else []


def learned_from(facts: RunFacts) -> Section:
    """Show, site by class, the pictures that the model learned from, and of how many lesions they are."""
    classes = list(facts.summary.get("classes") or ())
    blocks: list[ReportBlock] = [FactList(rows=_task_facts(facts))]
    told = [name for name in shown_sites(facts) if facts.sites[name].get("learned_images")]
    if told:
        blocks.append(_classes_table(facts, told, classes))
    else:
        why = (
            "how many pictures of each class the sites learned from is not recorded in this run"
            if facts.judged
            else "this run learned a network without labels"
        )
        blocks.append(Words(text=capital(f"{why}.")))
    blocks.append(_rows_table(facts))
    if meanings := [(name, KNOWN[name]) for name in classes if name in KNOWN]:
        rows = [[ReportCell(name), *plain(info.name, info.malignancy, info.meaning)] for name, info in meanings]
        caption = "What EdgeFL knows of the labels of ISIC and HAM10000. Other classes count as suspicious."
        head = ("class", "name", "malignancy", "meaning")
        blocks.append(ReportTable(head=head, rows=rows, text_columns=(0, 1, 2, 3), caption=caption))
    return Section(title="What was learned, and from whom", blocks=[*blocks, *left_out(facts)])


def _task_facts(facts: RunFacts) -> list[tuple[str, ReportCell]]:
    settings, summary = facts.run.settings, facts.summary
    classes = list(summary.get("classes") or ())
    what = "answers" if facts.run.questions is not None else "classes"
    return [
        ("task", ReportCell(settings.task)),
        (f"{what} that are told apart", ReportCell(f"{len(classes)}: {listed(classes)}" if classes else UNDEFINED)),
        ("data", ReportCell(", ".join(map(without_folders, settings.data)))),
        ("frozen or first network", ReportCell(without_folders(settings.backbone))),
        (
            "figures are of",
            ReportCell(f"the {summary.get('reported_rows', NOT_RECORDED)} rows, which nothing learned from"),
        ),
    ]


def _classes_table(facts: RunFacts, names: Sequence[str], classes: Sequence[str]) -> ReportTable:
    sites = facts.sites
    most = max(max(sites[name]["learned_images"]) for name in names) or 1
    rows = []
    for name in names:
        cells = [ReportCell(name)]
        for place, count in enumerate(sites[name]["learned_images"]):
            lesions = sites[name]["learned_lesions"][place]
            path, below = ("sites", name, "learned_images", place), f"of {lesions:,}" if count else ""
            cells.append(ReportCell(f"{count:,}", path, shade=count / most, below=below))
        rows.append([*cells, ReportCell(f"{sites[name]['n_train']:,}", ("sites", name, "n_train"), strong=True)])
    totals, lesions = (
        np.sum([sites[name][key] for name in names], axis=0) for key in ("learned_images", "learned_lesions")
    )
    last = [ReportCell(f"{n:,}", strong=True, below=f"of {of:,}") for n, of in zip(totals, lesions, strict=True)]
    rows.append([ReportCell("together", strong=True), *last, ReportCell(f"{totals.sum():,}", strong=True)])
    return ReportTable(
        head=("site", *classes, "all"),
        rows=rows,
        caption="Training pictures by site and class; below, of how many lesions they are. Darker: more pictures.",
    )


def _rows_table(facts: RunFacts) -> ReportTable:
    rows = []
    for name in shown_sites(facts):
        site = facts.sites[name]
        part = site.get("took_part")
        role = "never trained (held out)" if site.get("held_out") else "trained"
        rounds = f"{part['rounds']} of {part['of']}" if part else (UNDEFINED if site.get("held_out") else NOT_RECORDED)
        counts = [figure(facts.summary, ("sites", name, key), "count") for key in ("n_train", "n_tune", "n_test")]
        rows.append([ReportCell(name), *counts, ReportCell(rounds), ReportCell(role)])
    return ReportTable(
        head=("site", "to learn", "to tune", "to report", "rounds taken part", "part"),
        rows=rows,
        text_columns=(0, 5),
        caption="Pictures of each site by use. Pictures of one lesion have one use only, unless the data's own split "
        "says otherwise.",
    )


def method_section(facts: RunFacts) -> Section:
    """Show the method, its paper, every setting with its value, and where that comes from."""
    settings = facts.run.settings
    method = settings.build_method()
    asked = facts.run.questions is not None
    values = facts.run.hyper
    described: Sequence[Described] = settings_of(settings.method, asked=asked) or settings_of(settings.method)
    rows = [
        [ReportCell(one.key), ReportCell(value_text(values.get(one.key, one.default))), *plain(one.source, one.meaning)]
        for one in described
    ]
    first: list[tuple[str, ReportCell]] = [
        ("method", ReportCell(settings.method)),
        ("what it does", ReportCell(purpose(type(method)))),
        ("paper", ReportCell(type(method).paper)),
        ("schedule", ReportCell(schedule(settings, facts.summary).removeprefix(f"{NO_PRESET}, "))),
        ("model that is kept", ReportCell(_kept(facts))),
        ("seed", figure(facts.summary, ("seed",), "count")),
        (
            "draws of training pictures",
            ReportCell("classes equally often" if settings.balance == "class" else "as they are"),
        ),
        ("colour of the light", ReportCell("kept" if settings.colour == "none" else f"removed ({settings.colour})")),
    ]
    return Section(
        title="Method and settings",
        blocks=[
            FactList(rows=first),
            ReportTable(
                head=("setting", "value", "source", "meaning"),
                rows=rows,
                text_columns=(0, 1, 2, 3),
                caption="Every setting of the method. Source: the paper that has it, or ours where none has.",
            )
            if rows
            else Words(text="The method has no settings of its own."),
        ],
    )


def _kept(facts: RunFacts) -> str:
    return {
        "last": "that of the last round",
        "tune": "each site's best round, by its tune rows",
        "pooled": "one round for all sites, the best by their tune rows together",
    }.get(str(facts.summary.get("select")), NOT_RECORDED)


def environment_section(facts: RunFacts, written_at: str) -> Section:
    """Show versions, machine, dates and digests, by which the run can be repeated, and this page be checked."""
    found, summary = facts.environment, facts.summary
    rows: list[tuple[str, ReportCell]] = [
        ("begun", ReportCell(_date(found.get("begun")))),
        ("finished", ReportCell(_date(found.get("finished")))),
        ("this page written", ReportCell(_date(written_at))),
        ("working time of all sites", ReportCell(time_text(summary.get("seconds")), ("seconds",))),
    ]
    *earlier, last = all_environments(found)
    for number, place in enumerate(earlier, 1):
        which = f", {number} of {len(earlier)}" if len(earlier) > 1 else ""
        rows += [(f"{name} before the run went on{which}", cell) for name, cell in _place(place)]
    rows += _place(last)
    digests = {
        "state_sha256": "the state of server and sites at the end",
        "site_sha256": "the state of this site at the end",
        "partition_sha256": "which rows each site had",
        "backbone_sha256": "the weights of the network",
        "settings_sha256": "all settings but the seed",
    }
    kept: list[tuple[str, ReportCell]] = [
        (f"{name}: {what}", ReportCell(str(summary[name]), (name,)))
        for name, what in digests.items()
        if summary.get(name)
    ]
    kept.append(("SHA-256 of summary.json, which holds the figures of this page", ReportCell(facts.summary_sha256)))
    return Section(title="Environment and digests", blocks=[FactList(rows=rows), FactList(rows=kept)])


def _place(found: Mapping[str, Any]) -> list[tuple[str, ReportCell]]:
    """Machine, versions and commit of an `environment.json`."""
    machine = found.get("machine", {}) if isinstance(found.get("machine"), dict) else {}
    versions = found.get("versions", {}) if isinstance(found.get("versions"), dict) else {}
    return [
        ("processor", ReportCell(str(machine.get("processor", NOT_RECORDED)))),
        ("graphics card", ReportCell(str(machine.get("cuda") or "none"))),
        ("system", ReportCell(str(machine.get("system", NOT_RECORDED)))),
        ("threads", ReportCell(str(machine.get("threads", NOT_RECORDED)))),
        ("versions", ReportCell(", ".join(f"{name} {version}" for name, version in versions.items()) or NOT_RECORDED)),
        ("commit", ReportCell(str(found.get("commit") or NOT_RECORDED))),
    ]


def _date(found: Any) -> str:
    """A date of `environment.json` as a person reads it."""
    if not isinstance(found, str):
        return NOT_RECORDED
    return found.replace("T", " ").removesuffix("+00:00") + (" UTC" if found.endswith("+00:00") else "")
