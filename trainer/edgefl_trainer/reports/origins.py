"""What was learned, from whom, how, and what left the sites: the sections of a report that need no judged picture."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgefl_protocol.pictures.class_info import KNOWN
from edgefl_protocol.rules.maps import MAX_MAPS, sent_maps_in
from edgefl_protocol.rules.travels import KINDS
from edgefl_protocol.sentences import capital, counted, joined_by_and
from edgefl_trainer.data.tasks import listed
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.settings import without_folders
from edgefl_trainer.evaluate.tables.text import bytes_text, time_text
from edgefl_trainer.experiments.run_words import schedule
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
    found_at,
    plain,
)
from edgefl_trainer.reports.described import Described, purpose, settings_of, value_text
from edgefl_trainer.reports.run_facts import RunFacts

MOST_ROWS = 200  # sites of a table; `summary.json` has all
KIND_WORDS = {
    "features": "features: what the network makes of pictures, each or summed up",
    "prototypes": "prototypes: the mean features of each class",
    "logits": "mean answers of the model for each class",
    "prompts": "prompts: learned inputs of the frozen network",
    "weights": "weights of the network, of the head, or of an optimiser",
}
MAPS = "maps"  # of which a run sends each, or of every class their mean
WHAT_MAPS_TELL = (
    "A single map is a fingerprint of its picture; a mean of five is less of one. In another run an attack named from "
    "a single map the right one of 200 pictures in 64 %, and from a mean of five in 17 %; a guess is right in 4 % "
    "(docs/results/what_leaves.md)."
)
OF_A_CLASS = ("maps", "prototypes", "logits")  # kinds whose arrays are named by their class


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
    values = hyper_values(method)
    described: Sequence[Described] = settings_of(settings.method, asked=asked) or settings_of(settings.method)
    rows = [
        [ReportCell(one.key), ReportCell(value_text(values.get(one.key, one.default))), *plain(one.source, one.meaning)]
        for one in described
    ]
    first: list[tuple[str, ReportCell]] = [
        ("method", ReportCell(settings.method)),
        ("what it does", ReportCell(purpose(type(method)))),
        ("paper", ReportCell(type(method).paper)),
        ("schedule", ReportCell(schedule(settings))),
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


def travels_section(facts: RunFacts) -> Section:
    """Tell what a site sends and receives, in kinds and bytes, and what never leaves it."""
    summary = facts.summary
    kinds = found_at(summary, ("travels",))
    blocks: list[ReportBlock] = [Words(text=_where(facts))]
    if not isinstance(kinds, list):
        blocks.append(Words(text="Which kinds of values leave a site is not recorded in this run."))
        kinds = []
    elif kinds:
        rows = [plain(kind, _sent_maps(facts) if kind == MAPS else KIND_WORDS.get(kind, kind)) for kind in kinds]
        blocks.append(ReportTable(head=("leaves a site", "what it is"), rows=rows, text_columns=(0, 1)))
    else:
        blocks.append(Words(text="Nothing leaves a site: each learns alone."))
    blocks.append(
        FactList(
            rows=[
                ("bytes up in a round, all sites", _bytes(summary, "bytes_up_per_round")),
                ("bytes down in a round, all sites", _bytes(summary, "bytes_down_per_round")),
                ("bytes of one whole model", _bytes(summary, "full_model_bytes")),
            ]
        )
    )
    if kinds:
        told = [WHAT_MAPS_TELL] if MAPS in kinds else []
        blocks += [Words(text=text) for text in [*told, *_never(kinds), _measured(kinds, facts)]]
    if table := _site_bytes(facts):
        blocks.append(table)
    return Section(title="What leaves a site, and what never does", blocks=blocks)


def _sent_maps(facts: RunFacts) -> str:
    """Say what a site sends of its rollout maps, as the run was set: a mean of one map is that map."""
    values = hyper_values(facts.run.settings.build_method())
    most = int(values.get("maps_per_class", MAX_MAPS))
    if most > 1 and sent_maps_in(values) == "mean":
        what = f"of each class the mean of the maps of at most {most} training pictures; of one picture, its own map"
    else:
        what = f"of each class the single maps of at most {counted(most, 'training picture')}"
    return f"rollout maps: where the network looks, {what}"


def _where(facts: RunFacts) -> str:
    if facts.live:
        return (
            "This site was a member of a live federation: what it sent was signed and sealed for the coordinator. This "
            "page tells of this site alone; those of the others hold their figures."
        )
    return (
        "All sites of this run were worked on where it ran, as they would run apart: a site saw its own rows and what "
        "the server sent. Every byte between them is counted."
    )


def _never(kinds: Sequence[str]) -> list[str]:
    others = [kind for kind in KINDS if kind not in kinds]
    named = [kind for kind in kinds if kind in OF_A_CLASS]
    told = [
        "A payload holds arrays of these kinds, and a few numbers and words beside them: such as how many pictures a "
        "site learned from, and the digest of its state. Pictures, file names and names of lesions are in none. "
        + (f"{capital(joined_by_and(others))} never left a site: " if others else "")
        + ("a reply with an array of another kind is refused before it leaves." if others else "")
    ]
    if named:
        told.append(
            f"Each array of {joined_by_and(named)} bears the class that it is of, so a reply also tells which classes "
            "a site has learned from."
        )
    return [text.strip() for text in told]


def _measured(kinds: Sequence[str], facts: RunFacts) -> str:
    """Say of which kinds an audit measured how much they tell of pictures, and of which none did."""
    attacked = [kind for kind in kinds if kind in facts.attacked]
    others = [kind for kind in kinds if kind not in facts.attacked]
    told = "What leaves is no picture, but is made of pictures."
    if attacked:
        told += f" How much {joined_by_and(attacked)} tell of them was measured: see the audit below."
    if others:
        told += f" How much {joined_by_and(others)} tell of them was not measured in this run."
    return told


def _bytes(summary: Mapping[str, Any], key: str) -> ReportCell:
    value = found_at(summary, (key,))
    if value == NOT_RECORDED or value is None:
        return ReportCell(NOT_RECORDED)
    return ReportCell(f"{bytes_text(value)} ({value:,.0f} bytes)", (key,))


def _site_bytes(facts: RunFacts) -> ReportTable | None:
    """Mean bytes of each site in the rounds that it took part in; None where no line tells."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for line in facts.lines:
        if line.get("phase") == "train" and "bytes_up" in line and "bytes_down" in line:
            found[str(line["site"])].append((line["bytes_up"], line["bytes_down"]))
    if not found:
        return None
    rows = [
        [
            ReportCell(name),
            *(ReportCell(f"{np.mean([one[side] for one in pairs]):,.0f}") for side in (0, 1)),
            ReportCell(str(len(pairs))),
        ]
        for name, pairs in sorted(found.items())[:MOST_ROWS]
    ]
    return ReportTable(
        head=("site", "bytes up", "bytes down", "rounds"),
        rows=rows,
        caption="Mean bytes of a round in which the site took part (metrics.jsonl).",
    )


def environment_section(facts: RunFacts, written_at: str) -> Section:
    """Show versions, machine, dates and digests, by which the run can be repeated, and this page be checked."""
    found, summary = facts.environment, facts.summary
    machine = found.get("machine", {}) if isinstance(found.get("machine"), dict) else {}
    versions = found.get("versions", {}) if isinstance(found.get("versions"), dict) else {}
    rows: list[tuple[str, ReportCell]] = [
        ("begun", ReportCell(_date(found.get("begun")))),
        ("finished", ReportCell(_date(found.get("finished")))),
        ("this page written", ReportCell(_date(written_at))),
        ("working time of all sites", ReportCell(time_text(summary.get("seconds")), ("seconds",))),
        ("processor", ReportCell(str(machine.get("processor", NOT_RECORDED)))),
        ("graphics card", ReportCell(str(machine.get("cuda") or "none"))),
        ("system", ReportCell(str(machine.get("system", NOT_RECORDED)))),
        ("threads", ReportCell(str(machine.get("threads", NOT_RECORDED)))),
        ("versions", ReportCell(", ".join(f"{name} {version}" for name, version in versions.items()) or NOT_RECORDED)),
        ("commit", ReportCell(str(found.get("commit") or NOT_RECORDED))),
    ]
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


def _date(found: Any) -> str:
    """A date of `environment.json` as a person reads it."""
    if not isinstance(found, str):
        return NOT_RECORDED
    return found.replace("T", " ").removesuffix("+00:00") + (" UTC" if found.endswith("+00:00") else "")
