"""Sites that took part in no training round: their models have learned nothing from their own pictures.

Where a run draws a share of the sites for each round, some may never be drawn; a site of a live federation may come too
late. Guarantee: they stay in every figure of `summary.json`, as the others do; texts and pictures say which they are. A
held-out site (`engine.held_out`) is no such site: it was never to train, and is in no mean.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edgefl_protocol.sentences import counted, listed


def in_no_round(summary: Mapping[str, Any]) -> list[str]:
    """Name the sites of a summary that took part in none of its rounds; none of a run from before that was kept."""
    return [name for name, site in summary.get("sites", {}).items() if (part := _part(site)) and not part["rounds"]]


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
    counts = f"; mean and worst count {'it' if one else 'them'} all the same" if beside else ""
    return f"{whose(absent)}, so {'its' if one else 'their'} figures are not those of a site that learned{counts}"


def _rounds(site: Mapping[str, Any]) -> str:
    return counted(site["took_part"]["of"], "round")


def _part(site: Mapping[str, Any]) -> Mapping[str, int] | None:
    return site.get("took_part")
