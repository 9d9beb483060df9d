"""`edgefl-train methods`: the methods, what travels in each and whether it needs labels."""

import json
from typing import Any

import click

from edgefl_trainer.commands.extra import needs_trainer


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of text.")
@needs_trainer
def methods(as_json: bool) -> None:
    """List the methods, what each sends, and which need labels. What travels is told for the default settings."""
    from edgefl_trainer.methods import METHODS

    facts: list[dict[str, Any]] = [
        {
            "name": name,
            "family": kind.family,
            "paper": kind.paper,
            "travels": list(kind().travels),
            "needs_labels": kind.needs_labels,
        }
        for name, kind in sorted(METHODS.items())
    ]
    if as_json:
        click.echo(json.dumps(facts))
        return
    for fact in facts:
        labels = "labelled images" if fact["needs_labels"] else "no labels"
        sent = ", ".join(fact["travels"]) or "nothing"
        click.echo(f"{fact['name']:<14}sends {sent}; needs {labels}; {fact['paper']}")
