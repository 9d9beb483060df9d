"""What `edgefl-export` tells a person of a bundle that it made, or that it was shown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from edgefl_export.bundles.assemble import Members, SiteModel
from edgefl_export.parity.step_parity import StepParity
from edgefl_protocol.bundle import Card, Labels
from edgefl_protocol.bundle.card_words import card_lines, quality_lines, shown_weaknesses
from edgefl_protocol.bundle.question_table import MEMBER, QuestionTable
from edgefl_protocol.bundle.question_words import why_no_map
from edgefl_protocol.bundle.shown_map import ShownMap, how_true, no_map


def compared_on(model: SiteModel) -> str:
    """Name what a model is compared on: images, or questions where it answers some."""
    return "images" if model.questions is None else "questions"


def model_facts(model: SiteModel, members: Members, shown: ShownMap, steps: Sequence[StepParity]) -> dict[str, Any]:
    """Say what a bundle was compared with and what it tells of its model, as `--json` prints it."""
    return {
        "parity": {figure.quantity: {"worst": figure.worst, "allowed": figure.allowed} for figure in members.parity},
        "suspicion": None if members.card.suspicion is None else asdict(members.card.suspicion),
        "map": shown.to_json(),
        "undescribed": [] if model.info is None else [name for name in model.classes if name not in model.info],
        "questions": None if model.questions is None else _question_facts(members.card, members.files),
        "quality": [] if model.questions is not None else _quality(members),
        "int8": None if members.agreement is None else asdict(members.agreement),
        "training": {figure.quantity: {"worst": figure.worst, "allowed": figure.allowed} for figure in steps},
    }


def _quality(members: Members) -> list[str]:
    """Say what speaks against a model of pictures, else how right it was; `suspicion` tells of its threshold."""
    labels = Labels.from_bytes(members.files["labels.json"])
    against = [f"WARNING: {one}" for one in shown_weaknesses(members.card, labels)]
    return against or [quality_lines(members.card, labels)[0]]


def _question_facts(card: Card, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Say what a bundle that answers questions knows, how it did on `tune` questions, and what speaks against it."""
    table, labels = QuestionTable.from_bytes(files[MEMBER]), Labels.from_bytes(files["labels.json"])
    return {
        "answers": len(labels.classes),
        "words": len(table.vocabulary.words),
        "taught": None if table.taught is None else sum(table.taught),
        "tried": None if table.tried is None else asdict(table.tried),
        "told": card_lines(card, labels, table),
        "no_map": why_no_map(card.map, table),
    }


def bundle_text(facts: Mapping[str, Any]) -> str:
    """Write what was made, and what it was compared with, for a person."""
    lines = [f"{facts['file']}  {facts['bytes']:,} bytes  sha256 {facts['sha256']}"]
    lines += [f"signed by {key}" for key in facts["signers"]]
    graph = "the graph, before its layers got 8 bits," if facts["int8"] else "the graph"
    compared = "images" if facts["questions"] is None else "questions"
    lines.append(f"largest difference between {graph} and the trainer, on 64 {compared} in batches of 1 and of 8:")
    lines += [f"  {name:<14}{f['worst']:.1e}  (allowed {f['allowed']:.0e})" for name, f in facts["parity"].items()]
    shown = ShownMap.from_json(facts["map"])
    said = how_true(shown, "picture" if facts["questions"] is None else "question")
    why_not = no_map(shown) if facts["questions"] is None else facts["questions"]["no_map"]
    lines.append(f"map shown: {shown.kind}. {said}" if why_not is None else why_not)
    lines += facts["quality"] if facts["questions"] is None else facts["questions"]["told"]
    if facts["suspicion"]:
        lines.append(facts["suspicion"]["statement"])
    if facts["undescribed"]:
        names = ", ".join(facts["undescribed"])
        lines.append(
            f"nobody described {names}: a device refers every picture for which it predicts such a class; describe "
            "it with --class-info FILE.toml"
        )
    if facts["int8"]:
        found = facts["int8"]
        lines.append(
            f"8 bits compared with fp32 on {found['images']} {compared}: {found['same_class']:.2%} get the same "
            f"{'class' if facts['questions'] is None else 'answer'} "
            f"(at least 99% must), and the uncertainty changes by {found['change']:.1e} on average (at most 1e-02)"
        )
        if found["other_referral"] is not None:
            lines.append(f"one refers and the other does not: {found['other_referral']:.2%} of these images")
    if facts["training"]:
        lines.append("relative distance between the training graph and the trainer after ten steps of learning:")
        lines += [
            f"  {name:<34}{f['worst']:.1e}  (allowed {f['allowed']:.0e})" for name, f in facts["training"].items()
        ]
    return "\n".join(lines)


def _date(time_ms: int | None) -> str:
    if time_ms is None:
        return "never"
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # a claim nobody checked may lie beyond the calendar
        return f"{time_ms} ms after 1970"


def inspect_text(facts: Mapping[str, Any]) -> str:
    """Write what a file claims to be, for a person; nobody's text moves the cursor or looks like a line of ours."""
    lines = ["not verified; the file claims:"]
    plain = ("federation", "line", "task", "version", "min_client", "min_runtime", "sha256")
    lines += [f"  {name:<14}{'-' if facts[name] is None else facts[name]}" for name in plain]
    lines += [f"  {name:<14}{_date(facts[name])}" for name in ("created", "expires")]
    lines += [f"  {'signer':<14}{key}" for key in facts["signers"]]
    lines += [f"  {member['name']:<22}{member['size']:>14,} bytes" for member in facts["members"]]
    for name in ("labels", "card"):
        if isinstance(facts[name], dict):
            lines += [f"  {json.dumps(key)[1:-1]:<18}{json.dumps(value)}" for key, value in facts[name].items()]
    return "\n".join(lines)
