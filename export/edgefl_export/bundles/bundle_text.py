"""What `edgefl-export bundle` and `inspect` print for a person."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from edgefl_protocol.bundle.shown_map import ShownMap, how_true


def bundle_text(facts: Mapping[str, Any]) -> str:
    """Write what `bundle` made, and how close its graph is to the trainer."""
    lines = [f"{facts['file']}  {facts['bytes']:,} bytes  sha256 {facts['sha256']}"]
    lines += [f"signed by {key}" for key in facts["signers"]]
    graph = "of the graph before its layers got 8 bits, " if facts["int8"] else ""
    lines.append(f"largest difference to the trainer, {graph}on 64 images, batches of 1 and 8:")
    lines += [f"  {name:<14}{f['worst']:.1e}  (allowed {f['allowed']:.0e})" for name, f in facts["parity"].items()]
    shown = ShownMap.from_json(facts["map"])
    lines.append(f"map shown: {shown.kind}. {how_true(shown)}" if shown.shown else how_true(shown))
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
            f"8 bits against fp32 on {found['images']} images: {found['same_class']:.2%} the same class, "
            f"mean change of uncertainty {found['change']:.1e}  (allowed 99% and 1e-02)"
        )
    if facts["training"]:
        lines.append("distance to the trainer after ten training steps, relative:")
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
    """Write what a bundle claims of itself."""
    lines = ["not verified; the file claims:"]
    plain = ("federation", "line", "task", "version", "min_client", "min_runtime", "sha256")
    lines += [f"  {name:<14}{'-' if facts[name] is None else facts[name]}" for name in plain]
    lines += [f"  {name:<14}{_date(facts[name])}" for name in ("created", "expires")]
    lines += [f"  {'signer':<14}{key}" for key in facts["signers"]]
    lines += [f"  {member['name']:<22}{member['size']:>14,} bytes" for member in facts["members"]]
    for name in ("labels", "card"):
        if isinstance(facts[name], dict):
            lines += [f"  {key:<18}{json.dumps(value, ensure_ascii=True)}" for key, value in facts[name].items()]
    return "\n".join(lines)
