"""`edgefl-train methods`: what each method does and for whom; of one method every setting."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgefl_trainer.commands.extra import needs_trainer

if TYPE_CHECKING:
    from edgefl_trainer.reports.described import Described


@click.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text: a list, or with NAME one object.")
@needs_trainer
def methods(name: str | None, as_json: bool) -> None:
    """List the methods, or every setting of one.

    Without NAME: what each method does, for whom, and what it sends. With NAME: key, default, allowed values, source
    and meaning of every setting. The source is the paper that has the setting, or `ours`.

    What is sent is told for the default settings. A setting is given to `run` as --set KEY=VALUE.
    """
    from edgefl_trainer.engine.hyper_parameters import check_method, method_class

    if name is not None:
        check_method(name)  # needs no PyTorch, whose import takes seconds
    from edgefl_trainer.methods import METHODS
    from edgefl_trainer.reports.described import settings_of

    if name is None:
        facts = [_facts(one, METHODS[one]) for one in sorted(METHODS)]
        click.echo(json.dumps(facts) if as_json else "\n".join(_text(fact) for fact in facts))
        return
    fact, settings = _facts(name, method_class(name)), settings_of(name)
    answers = [] if fact["needs_questions"] else settings_of(name, asked=True)
    if as_json:
        told = {"settings": [asdict(one) for one in settings]}
        more = {"settings_of_questions": [asdict(one) for one in answers]} if answers else {}
        click.echo(json.dumps({**fact, **told, **more}))
    else:
        click.echo(f"{_text(fact)}\n\n{settings_table(settings)}")
        if answers:
            click.echo(f"\nWhere the data asks questions about its pictures:\n\n{settings_table(answers)}")


def _facts(name: str, kind: Any) -> dict[str, Any]:
    from edgefl_trainer.contract import declared
    from edgefl_trainer.reports.described import purpose

    return {
        "name": name,
        "purpose": purpose(kind),
        "family": kind.family,
        "paper": kind.paper,
        "travels": list(kind().travels),
        "needs_labels": kind.needs_labels,
        "answers_questions": declared(kind).asked is not None,
        "needs_questions": declared(kind).questions_only,
    }


def _text(fact: dict[str, Any]) -> str:
    labels = "labelled images" if fact["needs_labels"] else "no labels"
    if fact["answers_questions"]:
        labels = "images with questions and answers" if fact["needs_questions"] else f"{labels}, or such with questions"
    sent = ", ".join(fact["travels"]) or "nothing"
    return f"{fact['name']:<14}{fact['purpose']}\n{'':<14}Sends {sent}; needs {labels}; {fact['paper']}."


def settings_table(settings: "Sequence[Described]") -> str:
    """Write key, default, allowed values, source and meaning of each setting, in columns; or that there is none."""
    if not settings:
        return "It has no settings."
    head = ("key", "default", "allowed", "source", "meaning")
    rows = [head, *((one.key, _default(one), one.allowed, one.source, one.meaning) for one in settings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def _default(one: "Described") -> str:
    """The default, and by preset what it makes of it: `0.00025 (bench84 0.0025)`."""
    from edgefl_trainer.reports.described import value_text

    given = ", ".join(f"{preset} {value_text(value)}" for preset, value in one.presets.items())
    return value_text(one.default) + (f" ({given})" if given else "")
