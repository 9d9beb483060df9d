"""`edgefl policy`: what may leave this device, at the command line."""

import dataclasses
import datetime
from typing import TYPE_CHECKING, Literal

import click

from edgefl_client.commands.options import home_of, home_option, json_option, report
from edgefl_protocol.rules.travels import KINDS

if TYPE_CHECKING:
    from edgefl_client.home import Home
    from edgefl_client.sharing.policy import Policy

_kinds_argument = click.argument("kinds", nargs=-1, required=True, metavar="KIND...", type=click.Choice(KINDS))


def _last_day(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> datetime.date | Literal["always"] | None:
    """Option callback: a day such as 2027-11-21, or "always"."""
    if value is None:
        return None
    if value == "always":
        return "always"
    try:
        return datetime.date.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a date such as 2027-11-21 nor the word always.") from None


@click.group()
def policy() -> None:
    """Decide what may leave this device; at first nothing may. Also decide how often, how much, and until when."""


@policy.command("show")
@json_option
@home_option
@click.pass_context
def policy_show(context: click.Context, as_json: bool, home_dir: str | None) -> None:
    """Show what may leave, and what left in the last 24 hours."""
    from edgefl_client.sharing.policy import load_policy

    home = home_of(context, home_dir)
    _tell(home, load_policy(home), as_json)


@policy.command(
    "allow",
    help=f"Allow that data of this KIND leaves the device. KIND: {', '.join(KINDS[:-1])} or {KINDS[-1]}.",
)
@_kinds_argument
@click.option(
    "--until",
    callback=_last_day,
    metavar="DAY",
    help="Last day of this consent, or always.  [default: a year from today]",
)
@json_option
@home_option
@click.pass_context
def policy_allow(
    context: click.Context,
    kinds: tuple[str, ...],
    until: datetime.date | Literal["always"] | None,
    as_json: bool,
    home_dir: str | None,
) -> None:
    """Keep the consent to these kinds."""
    from edgefl_client.sharing import enrolled_device
    from edgefl_client.sharing.policy import load_policy, save_policy

    home = home_of(context, home_dir)
    today = enrolled_device.today()
    last = today + datetime.timedelta(days=365) if until is None else until
    if isinstance(last, datetime.date) and last < today:
        raise click.UsageError(f"--until is {last.isoformat()}, which is in the past; today is {today.isoformat()}")
    day = last if isinstance(last, datetime.date) else None
    before = load_policy(home)
    changed = dataclasses.replace(before, allowed={**before.allowed, **dict.fromkeys(kinds, day)})
    save_policy(home, changed)
    _tell(home, changed, as_json)


@policy.command("deny")
@_kinds_argument
@json_option
@home_option
@click.pass_context
def policy_deny(context: click.Context, kinds: tuple[str, ...], as_json: bool, home_dir: str | None) -> None:
    """Forbid that data of this KIND leaves, also from the outbox."""
    from edgefl_client.sharing.policy import load_policy, save_policy

    home = home_of(context, home_dir)
    before = load_policy(home)
    kept = {kind: last for kind, last in before.allowed.items() if kind not in kinds}
    changed = dataclasses.replace(before, allowed=kept)
    save_policy(home, changed)
    _tell(home, changed, as_json)


@policy.command("limit")
@click.option("--rounds-per-day", type=click.IntRange(0), metavar="N", help="Most rounds to answer in 24 hours.")
@click.option("--bytes-per-day", type=click.IntRange(0), metavar="BYTES", help="Most bytes that may leave in 24 hours.")
@click.option("--bytes-per-round", type=click.IntRange(0), metavar="BYTES", help="Most bytes of one reply.")
@json_option
@home_option
@click.pass_context
def policy_limit(context: click.Context, /, as_json: bool, home_dir: str | None, **given: int | None) -> None:
    """Set how often data may leave, and how much. Limits that are not named stay as they are."""
    from edgefl_client.sharing.policy import load_policy, save_policy

    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        raise click.UsageError("name at least one of --rounds-per-day, --bytes-per-day and --bytes-per-round")
    home = home_of(context, home_dir)
    before = load_policy(home)
    changed = dataclasses.replace(before, limits=dataclasses.replace(before.limits, **named))
    save_policy(home, changed)
    _tell(home, changed, as_json)


def _tell(home: "Home", found: "Policy", as_json: bool) -> None:
    import time

    from edgefl_client.sharing.policy import policy_text
    from edgefl_client.sharing.spending import read_spent

    spent = read_spent(home, time.time_ns() // 1_000_000)
    value = {
        **found.to_json(),
        "file": str(home.policy_file),
        "last_24_hours": {"rounds": spent.rounds, "bytes": spent.bytes},
    }
    report(value, as_json, policy_text(found, spent))
