"""What an operator does about bundles and their signers: publish one, publish a root set, revoke a signer.

Guarantees: what would leave devices without a bundle that they take is refused or told. Whose bundles count is said by
the root set, and devices judge by it, never by the coordinator. Source: docs/security.md 2.6.5, 2.6.6 and 2.8.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl_coordinator.errors import NotAllowedError, OperatorError
from edgefl_coordinator.members import membership
from edgefl_coordinator.store import publishing, revocations
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_protocol.bundle import load_bundle, unverified_manifest
from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
from edgefl_protocol.bundle.manifest import Manifest, check_validity
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_protocol.errors import BundleError, RecordError
from edgefl_protocol.records.coordinator_records import MAX_RECORD_BYTES, IndexEntry, make_index
from edgefl_protocol.records.root import check_current, unverified_root
from edgefl_protocol.sentences import counted

Arguments = Mapping[str, Any]
Facts = dict[str, Any]

MAX_ROOT_BYTES = MAX_RECORD_BYTES + 2  # a line end after it


def revoke_signer(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Revoke a signer of bundles: {key_id, force} → {key_id, version of the list, bundles, devices, known}.

    `bundles` are those that fall with nothing that members take in their place, `devices` how many members have to do
    without, and `known` tells whether the root set lists the key or a published bundle names it.

    Raises:
        NotAllowedError: bundles fall, and `force` is not given; nothing was changed.
        OperatorError: the list is full.
    """
    key_id = str(arguments["key_id"])
    with coordinator.store.transaction() as connection:
        root, before = revocations.newest(connection), publishing.taken(connection)
        listed = () if root is None else (key.key_id for key in root.signers)
        known = key_id in {*listed, *publishing.all_signers(connection)}
        revocations.revoke_signer(connection, coordinator.clock(), key_id)
        version, _ = revocations.listed(connection)
        left = publishing.taken(connection)
        offered = {(one.line, one.task): one.version for one in publishing.current(connection)}
        devices = sum(one.role == "device" for one in membership.approved(connection))
        fallen = [
            {"line": line, "task": task, "version": number}
            for (line, task), number in before.items()
            if left.get((line, task)) != number
            and ((line, task) not in left or left[line, task] != offered[line, task])
        ]
        if fallen and not arguments.get("force"):
            raise NotAllowedError(_left_without(fallen, devices))
    told = {"key_id": key_id, "version": version, "known": known}
    return told | {"bundles": fallen, "devices": devices if fallen else 0}


def _left_without(fallen: list[Facts], devices: int) -> str:
    """Say why a signer is not revoked: which bundles fall, and what to do first."""
    named = ", ".join(f"{one['line']}/{one['task']} version {one['version']}" for one in fallen)
    lost = (
        f"{counted(devices, 'device')} would stop scoring at the next sync" if devices else "no device could fetch one"
    )
    return (
        f"nobody else signed {named}, and nothing that members take is published in its place, so {lost}; first "
        "publish a bundle of another signer whom the root set lists, or revoke this one with --force"
    )


def publish_root(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Publish a root set: {path} → {version, signers, coordinators, expires_ms, rotate}.

    `rotate` tells that it lists the next signing key alone, so that members wait for `rotate --signing`.

    Raises:
        RecordError: it is not the next one, or too few root keys signed it.
        NotAllowedError: it lists neither this coordinator's signing key nor the next one.
        OperatorError: settings name no root key, or the set is past its time.
        StorageError: it cannot be read.
    """
    settings, keys, home = coordinator.settings, coordinator.keys, coordinator.store.home
    if not settings.root_key_id:
        raise OperatorError(f"{home.config} names no root_key_id, so no member would accept a root set")
    record = read_bounded(Path(str(arguments["path"])), MAX_ROOT_BYTES).strip()
    root = unverified_root(record)
    check_current(root, coordinator.clock())
    known = [keys.signing.key_id]
    if home.next_public.exists():
        known.append(read_public_key(home.next_public).key_id)
    if not any(root.coordinator(key_id) for key_id in known):
        raise NotAllowedError(
            f"the root set does not list this coordinator's signing key ({known[0]}), so no member could trust it"
        )
    federation, pinned = settings.federation, settings.root_key_id
    with coordinator.store.transaction() as connection:
        root = revocations.publish_root(connection, coordinator.clock(), federation, pinned, record)
    sizes = {"signers": len(root.signers), "coordinators": len(root.coordinators)}
    rotate = root.coordinator(keys.signing.key_id) is None
    return {"version": root.version, "expires_ms": root.expires_ms, "rotate": rotate, **sizes}


def publish(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Publish a bundle file.

    {path, trust: [hex public keys]} → {line, task, version, sha256, bytes, verified, not_taken, already}. `not_taken`
    says why members do not take it by themselves, or is None; `already`, that this very bundle was published before,
    and its signature alone was checked now.

    Raises:
        OperatorError: another federation's bundle, one too large, or no higher version.
        BundleError: it is no bundle, is past its time, from the future or for a newer version, or none of the trusted
            keys signed it.
        StorageError: it cannot be read or stored.
    """
    now_ms = coordinator.clock()
    data = read_bounded(Path(str(arguments["path"])), MAX_ARCHIVE_BYTES)
    trust = [bytes.fromhex(item) for item in arguments["trust"]]
    manifest, claimed = unverified_manifest(data)
    if trust:
        manifest = _verified(data, trust, now_ms)
    federation = coordinator.settings.federation
    if manifest.federation != federation:
        found = "no federation" if manifest.federation is None else f"federation {manifest.federation}"
        raise OperatorError(
            f"the bundle is made for {found}, but this is the federation {federation}: export it with --federation "
            f"{federation}"
        )
    check_validity(manifest, now_ms, None)  # devices would refuse it: the index names no such bundle
    named: Facts = {"line": manifest.line, "task": manifest.task, "version": manifest.version}
    told = {**named, "bytes": len(data), "verified": bool(trust)}
    if trust and (before := _published_before(coordinator, data, named, claimed)):
        return {**told, **before, "already": True}
    blob = coordinator.store.put_blob(data)
    try:
        entry = IndexEntry(**named, sha256=blob.sha256, size=blob.size)
        make_index(coordinator.keys.signing, federation, [entry], now_ms, now_ms + 1)  # the index can name it
        with coordinator.store.transaction() as connection:
            publishing.publish(connection, now_ms, **named, bundle_id=manifest.id, blob=blob, signers=claimed)
            why = publishing.not_taken(connection, claimed)
    except (RecordError, OperatorError) as error:
        coordinator.store.drop_blobs([blob.name])
        if isinstance(error, RecordError):
            raise OperatorError(f"the index cannot name this bundle: {error}") from error
        raise
    return {**told, "sha256": blob.sha256, "not_taken": why or None, "already": False}


def _published_before(coordinator: Coordinator, data: bytes, named: Facts, claimed: Sequence[str]) -> Facts | None:
    """Tell digest and `not_taken` of the current bundle where these are its very bytes; None where they are not."""
    sha256 = hashlib.sha256(data).hexdigest()
    with coordinator.store.transaction() as connection:
        same = any(one.sha256 == sha256 and one.line == named["line"] and one.task == named["task"]
                   for one in publishing.current(connection))  # fmt: skip
        return {"sha256": sha256, "not_taken": publishing.not_taken(connection, claimed) or None} if same else None


def _verified(data: bytes, trust: list[bytes], now_ms: int) -> Manifest:
    """Verify a bundle under the keys that the operator named."""
    try:
        return load_bundle(data, trust, now_ms).manifest
    except BundleError as error:
        if error.code != "untrusted_key":
            raise
        _, claimed = unverified_manifest(data)
        raise BundleError(
            f"the key given with --trust did not sign the bundle; it is signed by {', '.join(claimed)}: give the "
            "signing.pub of that signer, if you know it",
            error.code,
        ) from error
