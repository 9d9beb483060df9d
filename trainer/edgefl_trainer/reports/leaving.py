"""What left the sites of a run, in kinds and bytes, and what never does: a section of a report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgefl_protocol.rules.feature_rows import MOST_ROWS as MOST_FEATURES
from edgefl_protocol.rules.maps import MAX_MAPS, sent_maps_in
from edgefl_protocol.rules.travels import KINDS
from edgefl_protocol.sentences import capital, counted, joined_by_and
from edgefl_trainer.engine.privacy.spent import privacy_lines
from edgefl_trainer.evaluate.tables.text import bytes_text
from edgefl_trainer.gaussian_noise import told_epsilon
from edgefl_trainer.reports.attacks import measured
from edgefl_trainer.reports.blocks import (
    NOT_RECORDED,
    FactList,
    ReportBlock,
    ReportCell,
    ReportTable,
    Section,
    Words,
    found_at,
    plain,
)
from edgefl_trainer.reports.origins import MOST_ROWS
from edgefl_trainer.reports.run_facts import RunFacts

KIND_WORDS = {
    "prototypes": "prototypes: the mean features of each class",
    "logits": "mean answers of the model for each class",
    "prompts": "prompts: learned inputs of the frozen network",
    "weights": "weights of the network, of the head, or of an optimiser",
}
FEATURES = "features"  # of each picture where a network is learned without labels, else summed up
SUMMED_FEATURES = "mean and spread over a site's training pictures of what the network makes of them"
MAPS = "maps"  # of which a run sends each, or of every class their mean
WHAT_MAPS_TELL = (
    "A single map is a fingerprint of its picture; a mean of five is less of one. In another run an attack named from "
    "a single map the right one of 200 pictures in 64 %, and from a mean of five in 17 %; a guess is right in 4 % "
    "(docs/results/what_leaves.md)."
)
OF_A_CLASS = ("maps", "prototypes", "logits")  # kinds whose arrays are named by their class


def travels_section(facts: RunFacts) -> Section:
    """Tell what a site sends and receives, in kinds and bytes, and what never leaves it."""
    summary, whose = facts.summary, _whose(facts)
    kinds = found_at(summary, ("travels",))
    blocks: list[ReportBlock] = [Words(text=_where(facts))]
    if not isinstance(kinds, list):
        blocks.append(Words(text="Which kinds of values leave a site is not recorded in this run."))
        kinds = []
    elif kinds:
        rows = [plain(kind, _words_of(kind, facts)) for kind in kinds]
        blocks.append(ReportTable(head=("leaves a site", "what it is"), rows=rows, text_columns=(0, 1)))
    else:
        blocks.append(Words(text="Nothing leaves a site: each learns alone."))
    blocks.append(
        FactList(
            rows=[
                (f"bytes up in a round{whose}", _bytes(summary, "bytes_up_per_round")),
                (f"bytes down in a round{whose}", _bytes(summary, "bytes_down_per_round")),
                *_before(facts),
                (f"bytes up in the whole run{whose}", _bytes(summary, "bytes_up_total")),
                (f"bytes down in the whole run{whose}", _bytes(summary, "bytes_down_total")),
                ("bytes of one whole model", _bytes(summary, "full_model_bytes")),
            ]
        )
    )
    blocks += _privacy(facts)
    if kinds:
        told = [WHAT_MAPS_TELL] if MAPS in kinds else []
        blocks += [Words(text=text) for text in [*told, *_never(kinds), measured(kinds, facts)]]
    if table := _site_bytes(facts):
        blocks.append(table)
    return Section(title="What leaves a site, and what never does", blocks=blocks)


def _privacy(facts: RunFacts) -> list[ReportBlock]:
    """Say what privacy noise cost and covers, with the bound that was set; that there was none, where values left."""
    summary = facts.summary
    lines = privacy_lines(summary)
    if not lines:
        told = "Nothing that left carries privacy noise, so no epsilon bounds what it tells."
        return [Words(text=told)] if summary.get("travels") else []
    spent, budget = summary.get("epsilon_spent") or {}, facts.run.settings.privacy_budget
    bound = f"the privacy budget of each site was {budget:g}" if budget else "no privacy budget was set"
    blocks: list[ReportBlock] = [Words(text=". ".join(map(capital, [*lines, bound])) + ".")]
    if spent and summary.get("privacy_noise"):  # an older run does not tell whether it bounds anything
        rows = [plain(name, told_epsilon(epsilon)) for name, epsilon in sorted(spent.items())[:MOST_ROWS]]
        blocks.append(ReportTable(head=("site", "epsilon spent"), rows=rows))
    return blocks


def _words_of(kind: str, facts: RunFacts) -> str:
    """Say what a kind is in this run."""
    if kind == MAPS:
        return _sent_maps(facts)
    if kind == FEATURES:
        return SUMMED_FEATURES if facts.judged else _each_feature(facts)
    return KIND_WORDS.get(kind, kind)


def _each_feature(facts: RunFacts) -> str:
    """Say how many features of a picture a site sends, as the run was set: each epoch of a round makes one of each."""
    values = facts.run.hyper
    each = 1 if values.get("dp_noise") else facts.run.settings.epochs
    return (
        "what the network makes of single training pictures, without a name: in a round at most "
        f"{counted(each, 'vector')} of each picture, and at most {int(values.get('queue', MOST_FEATURES)):,} in all"
    )


def _sent_maps(facts: RunFacts) -> str:
    """Say what a site sends of its rollout maps, as the run was set: a mean of one map is that map."""
    values = facts.run.hyper
    most = int(values.get("maps_per_class", MAX_MAPS))
    if most > 1 and sent_maps_in(values) == "mean":
        what = f"of each class the mean of the maps of at most {most} training pictures; of one picture, its own map"
    else:
        what = f"of each class the single maps of at most {counted(most, 'training picture')}"
    return f"rollout maps: where the network looks, {what}"


def _whose(facts: RunFacts) -> str:
    """End the name of a sum of bytes: a live site counts its own alone."""
    return "" if facts.live else ", all sites"


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


def _bytes(summary: Mapping[str, Any], key: str) -> ReportCell:
    value = found_at(summary, (key,))
    if value == NOT_RECORDED or value is None:
        return ReportCell(NOT_RECORDED)
    return ReportCell(f"{bytes_text(value)} ({value:,.0f} bytes)", (key,))


def _before(facts: RunFacts) -> list[tuple[str, ReportCell]]:
    """Bytes of what sites send before the first round, such as moments of their features; nothing where they do not."""
    first = [line for line in _counted_lines(facts) if line["round"] == 0]
    sums = {way: sum(int(line[f"bytes_{way}"]) for line in first) for way in ("up", "down")}
    return [
        (f"bytes {way} before the first round{_whose(facts)}", ReportCell(f"{bytes_text(value)} ({value:,.0f} bytes)"))
        for way, value in sums.items()
        if value
    ]


def _counted_lines(facts: RunFacts) -> list[Mapping[str, Any]]:
    return [line for line in facts.lines if "bytes_up" in line and "bytes_down" in line]


def _site_bytes(facts: RunFacts) -> ReportTable | None:
    """Bytes of each site: mean over the rounds that it took part in, and of the whole run; None where no line tells."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in _counted_lines(facts):
        found[str(line["site"])].append(line)
    if not any(line["phase"] == "train" for line in _counted_lines(facts)):
        return None
    rows = []
    for name, lines in sorted(found.items())[:MOST_ROWS]:
        rounds = [line for line in lines if line["phase"] == "train"]
        means = [np.mean([line[f"bytes_{way}"] for line in rounds]) if rounds else 0 for way in ("up", "down")]
        whole = [sum(int(line[f"bytes_{way}"]) for line in lines) for way in ("up", "down")]
        cells = (str(len(rounds)), *(f"{value:,.0f}" for value in (*means, *whole)))
        rows.append([ReportCell(name), *plain(*cells)])
    return ReportTable(
        head=("site", "rounds", "bytes up in a round", "bytes down in a round", "bytes up in all", "bytes down in all"),
        rows=rows,
        caption="Bytes of each site (metrics.jsonl). In a round: mean over the rounds in which it took part. In all: "
        "also what it sent before the first round and after the last.",
    )
