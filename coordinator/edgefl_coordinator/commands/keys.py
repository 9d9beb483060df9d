"""`edgefl-coordinator revoke`, `rotate` and `root`: keys that end, keys that change, and who vouches for them.

`root make`, `sign` and `show` need neither a coordinator nor its extra: they run where the root keys are, offline.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_coordinator.commands.options import FILE, JSON, PASSPHRASE, Operator, for_operator, guarded_offline
from edgefl_coordinator.commands.status import warning_lines, with_home
from edgefl_coordinator.store.moments import moment
from edgefl_protocol.durable import read_passphrase
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_protocol.envelopes.keys import PublicSigningKey, SigningKey
    from edgefl_protocol.records.root import Root

_DAY_MS = 24 * 3600 * 1000
_OUT = click.option("-o", "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), required=True,
                    help="File to write.")  # fmt: skip


@click.command()
@click.argument("name", required=False)
@click.option("--signer", metavar="PUB", type=FILE,
              help="Revoke this signer of bundles (signing.pub) instead of a member.")  # fmt: skip
@click.option("--force", is_flag=True,
              help="Revoke the signer even where devices then have no bundle to score with.")  # fmt: skip
@for_operator
def revoke(operator: Operator, name: str | None, signer: Path | None, force: bool) -> None:
    """Shut NAME out, withdraw its unused invite, or revoke a signer.

    The member is refused from its next request on, its keys count never again, and its reply of the open round is
    dropped. A new invite for NAME makes a new member, with new keys. Devices fetch the signed
    list of revoked keys with the index of bundles. A device whose list is older than 24 hours accepts no new bundle.
    """
    if (name is None) == (signer is None):
        raise click.UsageError("name either a member, or a signer of bundles with --signer PUB")
    if signer is not None:
        from edgefl_protocol.envelopes.key_files import read_public_key

        key = read_public_key(signer)
        facts = operator.run("revoke_signer", key_id=key.key_id, force=force)
        operator.show(facts, f"signer {key.key_id} is revoked")
        if not facts["known"]:
            told = f"the root set does not list {key.key_id}, and no published bundle names it"
            click.echo(f"warning: {told}: was another key meant?", err=True)
        stop = f", and {counted(facts['devices'], 'device')} cannot score after the next sync" * bool(facts["devices"])
        for one in facts["bundles"]:
            named = f"{one['line']}/{one['task']} version {one['version']}"
            click.echo(f"warning: {named} counts no more{stop}: publish another", err=True)
    else:
        facts = operator.run("revoke", name=name)
        with_home(operator, facts["warnings"])
        operator.show(
            facts, f"{name} is revoked" if facts["state"] == "revoked" else f"the invite for {name} is withdrawn"
        )
        for line in warning_lines(facts["warnings"]):
            click.echo(line, err=True)


@click.command()
@click.option("--signing", is_flag=True, help="Change the signing key instead of the sealing key; see above.")
@for_operator
def rotate(operator: Operator, signing: bool) -> None:
    """Renew the coordinator's sealing key now.

    `serve` does so every week by itself. The previous key opens messages for two more days and is then deleted. With
    --signing, the first call makes the next signing key and names the file of its public half. Once a published root
    set lists it, the second call changes to it, and to a new sealing key without a previous one. Members
    learn of it from the root set.

    After restoring a backup, first revoke again what was revoked since; then run this, so that members take the
    list of revoked keys again.
    """
    facts = operator.run("rotate", signing=signing)
    if not signing:
        operator.show(facts, f"sealing key {facts['number']} is in use")
        click.echo(
            f"{counted(facts['revoked'], 'key is', 'keys are')} revoked; if you have restored a backup, revoke again "
            "whatever was revoked after it was made",
            err=True,
        )
    elif facts["state"] == "prepared":
        operator.show(facts, f"made the next signing key: {facts['file']}")
        if not operator.as_json:
            click.echo(
                "next: sign a root set that lists it (root make --coordinator), publish the set, and run "
                "this command again at once: in between members refuse this coordinator",
                err=True,
            )
    else:
        operator.show(facts, f"signing key {facts['key_id']} is in use")


@click.group()
def root() -> None:
    """Make, sign, show and publish the federation's root set.

    It says who the coordinator is and who signs bundles, and is signed offline.

    \b
    On the machine that holds the root keys (no coordinator is needed there):
      edgefl-coordinator root make -o root-1 --federation NAME --root-key root.pub \\
          --coordinator signing.pub --signer bundles.pub --sign root.key
    Where the coordinator is:
      edgefl-coordinator root publish root-1 --home DIR
    """


@root.command()
@_OUT
@click.option(
    "--after",
    metavar="FILE",
    type=FILE,
    help="Previous root set: the new one gets its number plus one, and everything that is not given.",
)
@click.option("--federation", metavar="NAME", help="Name of the federation; required for the first set.")
@click.option("--root-key", "root_keys", metavar="PUB", type=FILE, multiple=True, help="Public root key; repeatable.")
@click.option(
    "--threshold", metavar="K", type=click.IntRange(1, 16), help="Number of root keys that must sign.  [default: 1]"
)
@click.option("--coordinator", "coordinators", metavar="PUB", type=FILE, multiple=True,
              help="Signing key of the coordinator that members trust (keys/signing.pub); repeatable.")  # fmt: skip
@click.option("--signer", "signers", metavar="PUB", type=FILE, multiple=True,
              help="Signer of this federation's bundles (signing.pub); repeatable.")  # fmt: skip
@click.option("--no-signers", is_flag=True, help="List no signer, even if the previous set lists some.")
@click.option("--signer-threshold", metavar="K", type=click.IntRange(1, 64),
              help="Number of trusted keys that must have signed a bundle.  [default: 1]")  # fmt: skip
@click.option("--days", metavar="DAYS", type=click.IntRange(1, 3650), default=365, show_default=True,
              help="Time the set is valid.")  # fmt: skip
@click.option("--sign", "keys", metavar="KEY", type=FILE, multiple=True, required=True,
              help="Private root key to sign with; repeatable.")  # fmt: skip
@PASSPHRASE
@guarded_offline
def make(out: Path, keys: tuple[Path, ...], passphrase_file: Path | None, **options: Any) -> None:
    """Make and sign a root set. Lists that are given replace those of the previous set."""
    from edgefl_protocol.durable import write_atomic
    from edgefl_protocol.records.root import make_root, unverified_root

    _check_new(out)
    before = None if options["after"] is None else unverified_root(_record(options["after"]))
    wanted = _wanted(options, before)
    signing = [_private(path, passphrase_file) for path in keys]
    for path, key in zip(keys, signing, strict=True):
        _check_counts(path, key, wanted, before)
    record = make_root(wanted, signing)
    write_atomic(out, record + b"\n")
    click.echo(f"root set {wanted.version} of {wanted.federation}, valid until {moment(wanted.expires_ms)}: {out}")
    _say_signed(record)


@root.command()
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--key", metavar="KEY", type=FILE, required=True, help="Private root key to sign with.")
@click.option("--after", metavar="FILE", type=FILE, help="Previous root set, for a root key that only that one lists.")
@_OUT
@PASSPHRASE
@guarded_offline
def sign(file: Path, key: Path, after: Path | None, out: Path, passphrase_file: Path | None) -> None:
    """Add one signature to a root set that another person made."""
    from edgefl_protocol.durable import write_atomic
    from edgefl_protocol.records.root import sign_root, unverified_root

    _check_new(out)
    unsigned, signing = _record(file), _private(key, passphrase_file)
    _check_counts(key, signing, unverified_root(unsigned), None if after is None else unverified_root(_record(after)))
    record = sign_root(unsigned, signing)
    write_atomic(out, record + b"\n")
    _say_signed(record)


@root.command()
@click.argument("file", metavar="FILE", type=FILE)
@JSON
@guarded_offline
def show(file: Path, as_json: bool) -> None:
    """Show what a root set says.

    Its signatures are not checked here, but when it is published, and by every device.
    """
    from edgefl_protocol.records.root import unverified_root

    record = _record(file)
    root = unverified_root(record)
    body = root.to_body()
    if as_json:
        click.echo(json.dumps(body))
        return
    ids = {name: [key.key_id for key in getattr(root, name)] for name in ("root_keys", "coordinators", "signers")}
    for name, value in (body | ids).items():
        text = ", ".join(value) if isinstance(value, list) else moment(value) if name.endswith("_ms") else value
        click.echo(f"{name}: {text}")
    _say_signed(record)


@root.command()
@click.argument("file", metavar="FILE", type=FILE)
@for_operator
def publish(operator: Operator, file: Path) -> None:
    """Give a root set to all members.

    It is refused unless enough root keys signed it and it follows the previous one.
    """
    facts = operator.run("publish_root", path=str(file.resolve()))
    text = f"published root set {facts['version']}: {counted(facts['signers'], 'signer')} of bundles"
    operator.show(facts, f"{text}, valid until {moment(facts['expires_ms'])}")
    if facts["rotate"]:
        next_ = operator.typed("edgefl-coordinator rotate --signing")
        click.echo(f"next: {next_}  (until then members refuse this coordinator)", err=True)


def _check_new(out: Path) -> None:
    if out.exists():
        raise click.UsageError(f"{out} exists; name another file")


def _check_counts(path: Path, key: "SigningKey", wanted: "Root", before: "Root | None") -> None:
    """Refuse a key whose signature would not count: a root key of the set, or of the one before, signs."""
    if key.public_key not in {*wanted.root_keys, *(() if before is None else before.root_keys)}:
        earlier = "; if it is one of the previous set's, name that set with --after" if before is None else ""
        raise click.UsageError(f"{path} is none of the set's root keys, so its signature would not count{earlier}")


def _wanted(options: dict[str, Any], before: "Root | None") -> "Root":
    """Return the set that the options of `make` stand for, after the one before."""
    from edgefl_protocol.records.root import Root

    if before is None and not (options["federation"] and options["root_keys"] and options["coordinators"]):
        raise click.UsageError("the first set needs --federation, --root-key and --coordinator")
    if before is not None and options["federation"] not in (None, before.federation):
        raise click.UsageError(
            f"--federation is {options['federation']}, but the previous set is of {before.federation}"
        )
    now_ms = time.time_ns() // 1_000_000

    def keys(name: str) -> "tuple[PublicSigningKey, ...]":
        given = _public(options[name])
        return given if given or before is None else tuple(getattr(before, name))

    def number(name: str) -> int:
        return int(options[name] or (1 if before is None else getattr(before, name)))

    return Root(
        federation=options["federation"] if before is None else before.federation,
        version=1 if before is None else before.version + 1,
        issued_ms=now_ms,
        expires_ms=now_ms + options["days"] * _DAY_MS,
        root_keys=keys("root_keys"),
        threshold=number("threshold"),
        coordinators=keys("coordinators"),
        signers=() if options["no_signers"] else keys("signers"),
        signer_threshold=1 if options["no_signers"] else number("signer_threshold"),
    )


def _public(paths: tuple[Path, ...]) -> "tuple[PublicSigningKey, ...]":
    from edgefl_protocol.envelopes.key_files import read_public_key

    return tuple(read_public_key(path) for path in paths)


def _private(path: Path, passphrase_file: Path | None) -> "SigningKey":
    from edgefl_protocol.durable import read_private
    from edgefl_protocol.envelopes.key_files import MAX_KEY_FILE_BYTES, signing_key_from_pem

    data = read_private(path, MAX_KEY_FILE_BYTES)
    encrypted = b"BEGIN ENCRYPTED" in data
    return signing_key_from_pem(data, read_passphrase(passphrase_file) if encrypted else None)


def _record(path: Path) -> bytes:
    from edgefl_protocol.durable import read_bounded
    from edgefl_protocol.records.coordinator_records import MAX_RECORD_BYTES

    return read_bounded(path, MAX_RECORD_BYTES + 2).strip()


def _say_signed(record: bytes) -> None:
    """Tell on standard error how many of the set's own root keys have signed it."""
    from edgefl_protocol.records.root import signed_by, unverified_root

    found = unverified_root(record)
    signed = signed_by(record, found)
    missing = max(0, found.threshold - signed)
    text = (
        "which is enough for its own threshold"
        if missing == 0
        else (f"and {counted(missing, 'more is', 'more are')} needed")
    )
    click.echo(f"{counted(signed, 'root key has', 'root keys have')} signed it, {text}", err=True)
