"""The bundles a device keeps: which one is in use, and which versions were seen.

A bundle enters only through `load_bundle`; its file is named by its SHA-256 and written before `current.json` names
it, so after a crash the old or the new bundle is in use, never none and never half of one (docs/security.md, check
33). A version below the highest seen of its (federation, line, task) is refused even where the newer file is gone.
A version counts as seen for as long as a signer that vouched for it is in force (`signers`): when a stolen key is
revoked or left out of the root set, the versions it alone has signed bind nobody, so a thief cannot lock the device out
with a number that no honest bundle reaches (TUF's recovery from a fast-forward attack).

Loading this module loads no numpy and no keys, so that `read_file` can run while they are loaded.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl_client.home import Home, read_json, write_json
from edgefl_protocol.bundle.archive import Archive, open_archive
from edgefl_protocol.durable import open_bounded, read_bounded, read_pieces, write_atomic
from edgefl_protocol.errors import BundleError, StorageError

if TYPE_CHECKING:
    from edgefl_client.trust.signers import Signers
    from edgefl_protocol.bundle import Bundle
    from edgefl_protocol.bundle.manifest import Manifest

MAX_BUNDLE_FILE_BYTES = 2**31
Line = tuple[str | None, str, str]  # federation, line, task


class NoModel(StorageError):
    """This home folder has no bundle in use."""

    code = "no_model"


def last_seen(home: Home, in_force: Collection[str] | None = None) -> dict[Line, int]:
    """Return the highest version seen of each (federation, line, task) that a signer `in_force` vouches for, or any."""
    seen: dict[Line, int] = {}
    for entry in _record(home)["seen"]:
        signer = entry.get("signer")
        if in_force is None or signer is None or signer in in_force:
            line = (entry["federation"], entry["line"], entry["task"])
            seen[line] = max(seen.get(line, 0), entry["version"])
    return seen


def current_sha256(home: Home) -> str | None:
    """Return the SHA-256 of the file of the bundle in use; None where none is."""
    sha256: str | None = _record(home)["current"]
    return sha256


def current_file(home: Home) -> Path:
    """Return the file of the bundle in use."""
    sha256 = current_sha256(home)
    if sha256 is None:
        if (home.member / "membership.json").exists():
            get = "fetch the federation's with edgefl sync, once its operator has published one"
        else:
            get = "install one with edgefl use FILE, or join a federation with edgefl enrol INVITE"
        raise NoModel(f"this device has no model yet: {get}; or name one with --model FILE")
    return home.models / f"{sha256}.edgefl"


def refuse_revoked(home: Home, signers: "Signers") -> None:
    """Raise a `BundleError`, `revoked_signer`, where the bundle in use is signed by revoked keys alone."""
    from edgefl_protocol.bundle import unverified_manifest

    if not signers.revoked:
        return
    try:
        data = read_bounded(current_file(home), MAX_BUNDLE_FILE_BYTES)
    except StorageError:  # none is in use
        return
    _, claimed = unverified_manifest(data)
    signers.refuse_revoked(claimed)


def is_in_use(home: Home, sha256: str) -> bool:
    """Tell whether the bundle of this SHA-256 is in use and its file is whole, neither lost nor damaged."""
    return current_sha256(home) == sha256 and _is_whole(home.models / f"{sha256}.edgefl", sha256)


def current_manifest(home: Home) -> "Manifest | None":
    """Give the manifest of the bundle in use; None where none is, or its file is damaged."""
    from edgefl_protocol.bundle import unverified_manifest

    try:
        return unverified_manifest(read_bounded(current_file(home), MAX_BUNDLE_FILE_BYTES))[0]
    except (StorageError, BundleError):
        return None


def _is_whole(file: Path, sha256: str) -> bool:
    hasher = hashlib.sha256()
    try:
        for piece in read_pieces(file, MAX_BUNDLE_FILE_BYTES):
            hasher.update(piece)
    except StorageError:
        return False
    return hasher.hexdigest() == sha256


def read_file(home: Home, file: Path | None) -> Archive:
    """Read and hash the bundle to score with, a named file or the one in use; nothing of it is verified yet.

    Raises:
        NoModel: no file is named and none was pulled.
        StorageError: the file cannot be read.
        BundleError: it is no archive.
    """
    found = current_file(home) if file is None else file
    if file is None and not found.exists():
        again = "install it again with edgefl use FILE, or in a federation fetch it with edgefl sync"
        raise StorageError(f"the model in use, {found}, is gone: {again}", "missing")
    with open_bounded(found, MAX_BUNDLE_FILE_BYTES) as opened:
        return open_archive(opened)


def open_model(home: Home, archive: Archive, extra_trust: Sequence[bytes], now_ms: int) -> "Bundle":
    """Verify what `read_file` read; keys in `extra_trust` are trusted for this call beside the list."""
    from edgefl_client.trust.signers import signers_in_force

    return verify_with(home, archive, signers_in_force(home, extra_trust), now_ms)


def verify_with(home: Home, archive: Archive, signers: "Signers", now_ms: int) -> "Bundle":
    """Verify a bundle against the signers that count now.

    Raises:
        BundleError: it is not a bundle that enough of them vouch for now.
    """
    from edgefl_protocol.bundle import load_bundle
    from edgefl_protocol.bundle.manifest import parse_signatures

    signatures = dict(archive.members).get("signatures.json")
    if signatures is not None and signers.revoked:
        signers.refuse_revoked(one.keyid for one in parse_signatures(signatures))
    bundle = load_bundle(archive, signers.public, now_ms, last_seen(home, signers.key_ids))
    signers.check(bundle)
    return bundle


def verify_again(home: Home, bundle: "Bundle", extra_trust: Sequence[bytes]) -> None:
    """Verify again that enough signers in force vouch for a bundle which `open_model` gave.

    Its date and the versions seen since are not asked for: what outlives its date is referred picture by picture, and a
    newer bundle is used after a restart.

    Raises:
        BundleError: they do not, in the words of `open_model`.
        StorageError: what says whose bundles count cannot be read.
    """
    from edgefl_client.trust.signers import signers_in_force
    from edgefl_protocol.bundle import verified_again

    signers = signers_in_force(home, extra_trust)
    signers.refuse_revoked(one.keyid for one in bundle.signed.signatures)
    signers.check(verified_again(bundle, signers.public))


def check_replaces(home: Home, bundle: "Bundle", signers: "Signers") -> None:
    """Refuse a bundle that may not take the place of the one in use: another line, or no higher version.

    A bundle of another federation, or of none, was put in by the owner before this device joined: it gives way.
    The one in use was verified when it came and is known by its SHA-256, so its manifest needs no signature here: it
    still counts after its time is over. Where its file is gone or damaged, only the highest versions seen count, so
    that a device can recover; so it can where none of its signers is in force any more.

    Raises:
        BundleError: `other_line` or `rolled_back`.
    """
    from edgefl_protocol.bundle import check_update, unverified_manifest

    sha256 = current_sha256(home)
    if sha256 in (None, bundle.sha256):
        return
    try:
        data = read_bounded(current_file(home), MAX_BUNDLE_FILE_BYTES)
    except StorageError:
        return
    if hashlib.sha256(data).hexdigest() != sha256:
        return
    manifest, claimed = unverified_manifest(data)
    if manifest.federation != bundle.manifest.federation:
        return
    try:
        check_update(manifest, bundle.manifest)
    except BundleError as error:
        if error.code != "rolled_back" or signers.key_ids & set(claimed):
            raise


def install(home: Home, data: bytes, bundle: "Bundle") -> Path:
    """Keep the bundle that `load_bundle` made of exactly these bytes, and use it; the one before is removed."""
    folder = home.prepare(home.models)
    path = folder / f"{bundle.sha256}.edgefl"
    write_atomic(path, data, mode=0o600)  # also where one lies there: it may be damaged
    record = _record(home)
    before = record["current"]
    entries = _with_seen(record["seen"], bundle)
    write_json(home.current_file, {"format": 1, "current": bundle.sha256, "seen": entries})
    if before not in (None, bundle.sha256):
        (folder / f"{before}.edgefl").unlink(missing_ok=True)
    return path


def _with_seen(seen: list[dict[str, Any]], bundle: "Bundle") -> list[dict[str, Any]]:
    """The versions seen, with those that the signers of this bundle vouch for now."""
    kept = {_seen_key(entry): entry for entry in seen}
    federation, line, task = bundle.manifest.line_key
    for signer in bundle.signers:
        entry = {"federation": federation, "line": line, "task": task, "signer": signer}
        before = kept.get(_seen_key(entry), {}).get("version", 0)
        kept[_seen_key(entry)] = {**entry, "version": max(before, bundle.manifest.version)}
    return [kept[key] for key in sorted(kept)]


def _seen_key(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return entry["federation"] or "", entry["line"], entry["task"], entry.get("signer") or ""


def _record(home: Home) -> dict[str, Any]:
    """`current.json`, in exactly its form: a gap in it would switch the protection against old versions off."""
    record = read_json(home.current_file, "which bundle is in use")
    if record is None:
        return {"format": 1, "current": None, "seen": []}
    if not _is_record(record):
        raise StorageError(
            f"{home.current_file} is damaged: it does not say which bundle is in use; restore it, or remove it and run "
            "edgefl sync",
            "damaged",
        )
    return record


def _is_record(record: dict[str, Any]) -> bool:
    if set(record) != {"format", "current", "seen"} or record["format"] != 1 or not isinstance(record["seen"], list):
        return False
    current, seen = record["current"], record["seen"]
    named = current is None or (isinstance(current, str) and re.fullmatch("[0-9a-f]{64}", current) and bool(seen))
    if not named or not all(_is_seen(entry) for entry in seen):
        return False
    return len({_seen_key(entry) for entry in seen}) == len(seen)


def _is_seen(entry: object) -> bool:
    if not isinstance(entry, dict) or set(entry) - {"signer"} != {"federation", "line", "task", "version"}:
        return False
    if "signer" in entry and not (isinstance(entry["signer"], str) and re.fullmatch("[0-9a-f]{64}", entry["signer"])):
        return False
    federation = entry["federation"]
    texts = [entry["line"], entry["task"], *([] if federation is None else [federation])]
    return all(isinstance(text, str) and text for text in texts) and _is_version(entry["version"])


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
