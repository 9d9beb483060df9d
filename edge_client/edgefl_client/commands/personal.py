"""`edgefl advanced personal`: the values that this device learned for itself, at the command line."""

import click

from edgefl_client.commands.options import home_of, home_option, json_option, report


@click.group()
def personal() -> None:
    """Show or remove what this device has learned for itself."""


@personal.command("show")
@json_option
@home_option
@click.pass_context
def personal_show(context: click.Context, as_json: bool, home_dir: str | None) -> None:
    """Show which values score pictures, and what their gate found."""
    from edgefl_client.doctor.status import personal_facts, weights_lines

    found = personal_facts(home_of(context, home_dir))
    report({"personal": found}, as_json, "\n".join(weights_lines(found)))


@personal.command("remove")
@click.option(
    "--all", "everything", is_flag=True, help="Also forget how far learning has come and which pictures it learns from."
)
@json_option
@home_option
@click.pass_context
def personal_remove(context: click.Context, everything: bool, as_json: bool, home_dir: str | None) -> None:
    """Go back to the bundle's values for good. What left this device before cannot be called back.

    The next round of learning continues where this one ended, unless --all is given.
    """
    from edgefl_client.learning.checkpoint import forget

    removed = forget(home_of(context, home_dir), everything=everything)
    text = f"removed: {', '.join(removed)}" if removed else "there was nothing learned here to remove"
    report({"removed": removed}, as_json, f"{text}; scores use the bundle's values")
