"""How a bundle comes into use on this device: fetched from its federation, or put in from a file.

Either way it is verified against the signers in force, its version is none that this device has left behind, and this
runtime can load it, before it takes the place of another. What fails leaves the one in use as it is. Each function
gives what `--json` prints. Source: docs/security.md 2.8, checks 26 and 33.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgefl_client.home import Home
from edgefl_client.sharing.enrolled_device import Device, today
from edgefl_client.trust import models
from edgefl_client.trust.signers import Signers, signers_in_force
from edgefl_client.trust.trusted_keys import add_trusted
from edgefl_exchange.errors import ExchangeError, NotEnrolled
from edgefl_exchange.member import Member
from edgefl_exchange.membership import load_membership
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.archive import open_archive
from edgefl_protocol.bundle.card_words import card_lines
from edgefl_protocol.bundle.manifest import Manifest
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import BundleError
from edgefl_protocol.messages.requests import TaskReply

_UNKNOWN_SIGNER = frozenset({"no_trusted_key", "untrusted_key"})


def run_pull(device: Device) -> dict[str, Any]:
    """Fetch the federation's current bundle, verify it and use it from now on.

    Raises:
        EdgeflError: no answer, a refusal, or a bundle that is not what it should be; the one in use stays.
    """
    with device.member() as member:
        task = member.task()
        found = fetch_bundle(device.home, member, task)
    if found is None:
        raise ExchangeError(f"the federation has published no bundle for {task.line}/{task.task} yet", "no_bundle")
    return found


def fetch_bundle(home: Home, member: Member, task: TaskReply) -> dict[str, Any] | None:
    """Do as `run_pull` while the keys are held; None where nothing is published for the task.

    A bundle of another federation, or of none, that its owner put in before joining gives way; one of this federation
    gives way to a higher version of its line and task only. A `BundleError` also where the one in use was revoked and
    nothing takes its place.
    """
    entry = member.index().current(task.line, task.task)
    if entry is None:
        _refuse_revoked(home)
        return None
    wanted = {"line": entry.line, "task": entry.task, "version": entry.version, "sha256": entry.sha256}
    if models.is_in_use(home, entry.sha256):
        _refuse_revoked(home)
        return {"changed": False, "file": str(models.current_file(home)), **wanted}
    data = member.bundle(entry.line, entry.task, entry.version)
    signers = signers_in_force(home)  # after the index: the root set and the revoked keys came before it
    bundle = _verified(home, data, signers, member.now_ms())
    named = (member.membership.federation, entry.line, entry.task, entry.version, entry.sha256)
    if (*bundle.manifest.line_key, bundle.manifest.version, bundle.sha256) != named:
        raise BundleError(
            f"the bundle that was received is {bundle.manifest.name} version {bundle.manifest.version}, not the one in "
            "the signed index; try again later, and tell the operator",
            code="other_bundle",
        )
    models.check_replaces(home, bundle, signers)
    return {"changed": True, "file": str(_install(home, data, bundle)), **wanted}


def _verified(home: Home, data: bytes, signers: Signers, now_ms: int) -> Bundle:
    """Verify the federation's bundle; without a root set its signer is unknown, and the operator can mend that."""
    try:
        return models.verify_with(home, open_archive(io.BytesIO(data)), signers, now_ms)
    except BundleError as error:
        if signers.root is not None or error.code not in _UNKNOWN_SIGNER:
            raise
        raise BundleError(
            "this federation has published no root set, which says whose bundles count, so its bundle is not used: ask "
            f"the operator to publish one, then run edgefl sync. By hand: {error}",
            error.code,
        ) from error


def _refuse_revoked(home: Home) -> None:
    """Say that this device cannot score: its model was revoked, and there is no other."""
    try:
        models.refuse_revoked(home, signers_in_force(home))
    except BundleError as error:
        raise BundleError(
            "the model in use was revoked by the federation, and no other is published, so this device cannot score; "
            "ask the operator for a new one, then run edgefl sync",
            error.code,
        ) from error


def run_use(device: Device, file: Path, trusted: Sequence[PublicSigningKey]) -> dict[str, Any]:
    """Verify the bundle in a file and use it from now on; `trusted` are signers that its owner names with it.

    They are trusted from then on, and only where the bundle is taken. On a member of a federation only that
    federation's bundles are: what its rounds are learned with is not its owner's choice.

    Raises:
        EdgeflError: the bundle is refused; the one in use and the signers stay as they are.
    """
    home = device.home
    data = read_bounded(file, models.MAX_BUNDLE_FILE_BYTES)
    signers = signers_in_force(home, [key.public for key in trusted])
    bundle = models.verify_with(home, open_archive(io.BytesIO(data)), signers, device.clock_ms())
    manifest, federation = bundle.manifest, _federation_of(home)
    if federation is not None:
        if manifest.federation != federation:
            raise BundleError(
                f"the bundle is {manifest.name}, but this device belongs to the federation {federation} and uses only "
                "its bundles: score with this one by --model FILE, or use it in another home folder (--home)",
                "other_federation",
            )
        models.check_replaces(home, bundle, signers)
    known: dict[str, Any] = {"federation": manifest.federation, "line": manifest.line, "task": manifest.task}
    known |= {"version": manifest.version, "sha256": bundle.sha256, "signers": list(bundle.signers)}
    known["quality"] = card_lines(bundle.card, bundle.labels, bundle.questions)
    for key in trusted:
        add_trusted(home, key, None, today())
    if models.is_in_use(home, bundle.sha256):
        return {"changed": False, "file": str(models.current_file(home)), **known}
    before = _replaced_by(home, manifest)
    return {"changed": True, **before, "file": str(_install(home, data, bundle)), **known}


def _replaced_by(home: Home, new: Manifest) -> dict[str, Any]:
    """Say what gives way to a bundle, and whether its line and version are the same; `replaced` is None for nothing."""
    before = models.current_manifest(home)
    same_line = before is not None and before.line_key == new.line_key
    return {
        "replaced": None if before is None else f"{before.name} version {before.version}",
        "replaced_sha256": None if before is None else models.current_file(home).stem,
        "same_line": same_line,
        "same_version": same_line and before is not None and before.version == new.version,
    }


def _federation_of(home: Home) -> str | None:
    try:
        return load_membership(home.member).federation
    except NotEnrolled:
        return None


def _install(home: Home, data: bytes, bundle: Bundle) -> Path:
    """Use a verified bundle: what this runtime cannot load or run must not take the place of what it can."""
    from edgefl_client.scoring.network import Network  # brings the runtime, which no other part of an exchange needs

    Network(bundle, threads=1).try_once()
    return models.install(home, data, bundle)
