"""Sites that took part in no training round: their models have learned nothing from their own pictures.

Where a run draws a share of the sites for each round, some may never be drawn; a site of a live federation may come too
late. Guarantee: they stay in every figure of `summary.json`, as the others do: a mean over those that happened to be
drawn would be one over other sites in each run. Texts and pictures say which they are, and beside the mean stands that
of the others. A held-out site (`engine.judging.held_out`) is no such site: it was never to train, and is in no mean.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edgefl_protocol.sentences import counted, listed
from edgefl_trainer.evaluate.answer_figures import USUAL
from edgefl_trainer.evaluate.one_class import mean_of

MARK = "‡"
SAYS = "took part in no round"


def in_no_round(summary: Mapping[str, Any]) -> list[str]:
    """Name the sites of a summary that took part in none of its rounds; none of a run from before that was kept."""
    return [name for name, site in summary.get("sites", {}).items() if (part := _part(site)) and not part["rounds"]]


def trained_sites(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Give the key `trained_sites`: those of no round by name, number and mean balanced accuracy of the others.

    Empty where every site took part in a round. Held-out sites and sites without a figure count nowhere.
    """
    absent = in_no_round(summary)
    if not absent:
        return {}
    others = [site for name, site in summary["sites"].items() if name not in absent and not site.get("held_out")]
    mean, number = mean_of(site.get("balanced_accuracy") for site in others)
    return {"trained_sites": {"no_round": absent, "sites": number, "mean_balanced_accuracy": mean}}


def part_lines(summary: Mapping[str, Any]) -> list[str]:
    """Write a line on the sites that took part in no round, and one where a site that stands alone missed some."""
    sites = summary.get("sites", {})
    absent = in_no_round(summary)
    if absent:
        return [f"{listed(absent)} took part in 0 of {_rounds(sites[absent[0]])}: {_learned(summary, absent)}"]
    return [
        f"{name} took part in {part['rounds']} of {_rounds(site)}"
        for name, site in sites.items()
        if len(sites) == 1 and (part := _part(site)) and part["rounds"] < part["of"]
    ]


def caption_of(summaries: Sequence[Mapping[str, Any]], rows: Sequence[str]) -> list[str]:
    """Return clauses of a caption: which sites of which runs took part in no round; `rows` are the runs' names."""
    found: dict[tuple[str, ...], list[str]] = {}
    for summary, row in zip(summaries, rows, strict=True):
        found.setdefault(tuple(in_no_round(summary)), []).append(f"{row}, seed {summary.get('seed')}")
    everywhere = len(found) == 1
    return [
        f"{listed(names)} took part in no round{'' if everywhere else f' of {listed(runs)}'}: {whose(names)}, and mean "
        f"and worst count {'it' if len(names) == 1 else 'them'} all the same"
        for names, runs in found.items()
        if names
    ]


def whose(names: Collection[str]) -> str:
    """Say that these sites' models have learned nothing from their own pictures."""
    one = len(names) == 1
    return (
        f"{'its model has' if one else 'their models have'} learned nothing from {'its' if one else 'their'} pictures"
    )


def _learned(summary: Mapping[str, Any], absent: Sequence[str]) -> str:
    one, beside = len(absent) == 1, len(summary["sites"]) > 1
    if "probe" in summary:
        return f"the backbone has learned nothing from {'its' if one else 'their'} pictures"
    counts = f"; mean and worst count {'it' if one else 'them'} all the same{_mean_beside(summary)}" if beside else ""
    return f"{whose(absent)}, so {'its' if one else 'their'} figures are not those of a site that learned{counts}"


def _mean_beside(summary: Mapping[str, Any]) -> str:
    """The mean of the sites that learned, as a clause; of answers, whose figure is another, nothing."""
    found = trained_sites(summary)["trained_sites"]
    if USUAL in summary or found["mean_balanced_accuracy"] is None:
        return ""
    many = "site that learned has" if found["sites"] == 1 else f"{found['sites']} sites that learned have"
    mean = "" if found["sites"] == 1 else " as their mean"
    return f", the {many} {100 * found['mean_balanced_accuracy']:.1f} %{mean}"


def _rounds(site: Mapping[str, Any]) -> str:
    return counted(site["took_part"]["of"], "round")


def _part(site: Mapping[str, Any]) -> Mapping[str, int] | None:
    return site.get("took_part")
