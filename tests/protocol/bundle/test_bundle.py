"""Bundles: one committed good file, and the ways to be wrong, each with the code it must be refused with."""

import hashlib
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.protocol.bundle.conftest import OTHER, code_of

from edgefl_protocol.bundle import build_bundle, load_bundle, unverified_manifest
from edgefl_protocol.bundle.archive import read_archive, write_archive
from edgefl_protocol.bundle.manifest import Signature, parse_manifest, write_signatures
from edgefl_protocol.bundle.model_card import Card, Labels
from edgefl_protocol.errors import BundleError
from edgefl_protocol.tensors import read_tensors, write_tensors


def test_committed_bundle_verifies(good: Any) -> None:
    """docs/security.md check 31: the fixture of format 1 verifies in every later version, and says what it said."""
    bundle = good.load()
    assert bundle.id == "demo/skin/all"
    assert bundle.sha256 == hashlib.sha256(good.data).hexdigest()
    assert bundle.signers == (good.key.key_id,)
    assert (bundle.manifest.version, bundle.manifest.min_runtime) == (3, "1.23")
    assert bundle.labels == Labels(("MEL", "NV", "BCC"), (True, True, False))
    assert bundle.card.sites == {"alpha": 40, "beta": 60}
    assert bundle.card.metrics == {"balanced_accuracy": {"value": 0.5, "interval": [0.4, 0.6]}, "auroc": None}
    assert bundle.preprocess.size == 8
    assert bundle.outputs == ("probabilities", "evidence", "vacuity", "dissonance", "map")
    assert sorted(bundle.weights) == ["head.bias", "head.weight", "prior", "temperature"]
    assert bundle.weights["temperature"] == np.float32(1.5)
    with zipfile.ZipFile(io.BytesIO(good.data)) as archive:  # any zip tool reads the same
        assert archive.testzip() is None
        assert archive.read("score.onnx") == bundle.score_onnx


def test_build_is_deterministic(good: Any) -> None:
    """docs/security.md check 32: the same input gives the same bytes, whatever the order of members and keys."""
    assert build_bundle(good.members, good.fields, [good.key]) == good.data
    shuffled = dict(reversed(good.members.items()))
    two = build_bundle(shuffled, good.fields, [good.key, OTHER])
    assert two == build_bundle(good.members, good.fields, [OTHER, good.key])
    assert load_bundle(two, [good.key.public, OTHER.public], good.now_ms, threshold=2).manifest == good.manifest


def edited(good: Any, **changes: object) -> bytes:
    record = json.loads(good.manifest.to_bytes())
    record.update(changes)
    return good.resign({}, json.dumps(record).encode())


def member_edit(good: Any, name: str, **changes: object) -> bytes:
    record = json.loads(good.members[name])
    record.update(changes)
    return good.resign({name: json.dumps(record).encode()})


def archive_edit(good: Any, **changes: bytes) -> bytes:
    """An archive whose members were exchanged without the signer, checksums of the zip made right again."""
    members = read_archive(good.data)
    return write_archive({**members, **{name.replace("__", "."): content for name, content in changes.items()}})


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def weights_of(good: Any) -> dict[str, np.ndarray]:
    return dict(read_tensors(good.members["weights.safetensors"], max_bytes=10**6)[0])


def nan_weights(good: Any) -> bytes:
    content = good.members["weights.safetensors"]
    return content[:-4] + struct.pack("<f", float("nan"))


WAYS_TO_BE_WRONG: dict[str, tuple[str, Callable[[Any], bytes]]] = {
    "empty": ("bad_archive", lambda g: b""),
    "not an archive": ("bad_archive", lambda g: b"\x7fELF" + bytes(200)),
    "truncated by a byte": ("truncated", lambda g: g.data[:-1]),
    "truncated in half": ("truncated", lambda g: g.data[: len(g.data) // 2]),
    "a byte behind the end": ("truncated", lambda g: g.data + b"\x00"),
    "flipped byte in the graph": ("bad_archive", lambda g: flipped(g.data, g.data.index(b"ReduceMean"))),
    "flipped byte, checksum mended": (
        "wrong_hash",
        lambda g: archive_edit(g, score__onnx=flipped(g.members["score.onnx"], 100)),
    ),
    "members of two bundles mixed": (
        "wrong_hash",
        lambda g: archive_edit(g, labels__json=Labels(("MEL", "NV", "AK"), (True, True, True)).to_bytes()),
    ),
    "signed by nobody trusted": ("untrusted_key", lambda g: build_bundle(g.members, g.fields, [OTHER])),
    "trusted key id, other key's signature": (
        "bad_signature",
        lambda g: archive_edit(
            g,
            signatures__json=write_signatures(
                [replace(g.signature(g.manifest.to_bytes(), OTHER), keyid=g.key.key_id)],
            ),
        ),
    ),
    "signature of another manifest": (
        "bad_signature",
        lambda g: archive_edit(g, manifest__json=replace(g.manifest, version=4).to_bytes()),
    ),
    "signature under another label": (
        "bad_signature",
        lambda g: archive_edit(
            g,
            signatures__json=write_signatures(
                [Signature(g.key.key_id, "ed25519", g.key.sign("efli1/index", g.manifest.to_bytes()))]
            ),
        ),
    ),
    "signature named by an unknown scheme": (
        "untrusted_key",
        lambda g: archive_edit(
            g, signatures__json=write_signatures([replace(g.signature(g.manifest.to_bytes()), alg="none")])
        ),
    ),
    "no signature": ("bad_signatures", lambda g: archive_edit(g, signatures__json=b"[]")),
    "same signature twice": (
        "bad_signatures",
        lambda g: archive_edit(g, signatures__json=write_signatures([g.signature(g.manifest.to_bytes())] * 2)),
    ),
    "signatures with a space": (
        "bad_signatures",
        lambda g: archive_edit(g, signatures__json=read_archive(g.data)["signatures.json"] + b" "),
    ),
    "unknown format": ("unknown_format", lambda g: edited(g, format=2)),
    "format true": ("unknown_format", lambda g: edited(g, format=True)),
    "extra key": ("bad_manifest", lambda g: edited(g, path="/etc/passwd")),
    "version 0": ("bad_manifest", lambda g: edited(g, version=0)),
    "version true": ("bad_manifest", lambda g: edited(g, version=True)),
    "version 3.0": ("bad_manifest", lambda g: edited(g, version=3.0)),
    "federation empty": ("bad_manifest", lambda g: edited(g, federation="")),
    "federation false": ("bad_manifest", lambda g: edited(g, federation=False)),
    "line with a slash": ("bad_manifest", lambda g: edited(g, line="../skin")),
    "expires as text": ("bad_manifest", lambda g: edited(g, expires="2030-01-01")),
    "min_client not a version": ("bad_manifest", lambda g: edited(g, min_client="newest")),
    "members not a list": ("bad_manifest", lambda g: edited(g, members={})),
    "hash in upper case": (
        "bad_manifest",
        lambda g: edited(g, members=[{"name": "card.json", "size": 1, "sha256": "A" * 64}]),
    ),
    "member named like a line of text": (
        "bad_manifest",
        lambda g: edited(g, members=[{"name": "a\x1b[2Jverified\n", "size": 1, "sha256": "a" * 64}]),
    ),
    "manifest twice the same key": (
        "bad_manifest",
        lambda g: g.resign({}, g.manifest.to_bytes().replace(b'"task":', b'"line":"x","task":')),
    ),
    "manifest nested 10^5 deep": ("bad_manifest", lambda g: g.resign({}, b"[" * 100_000)),
    "manifest with NaN": ("bad_manifest", lambda g: g.resign({}, g.manifest.to_bytes().replace(b":3", b":NaN"))),
    "manifest not UTF-8": ("bad_manifest", lambda g: g.resign({}, b"\xff" + g.manifest.to_bytes())),
    "expired": ("expired", lambda g: edited(g, expires=g.now_ms)),
    "dated in the year 2096": ("from_future", lambda g: edited(g, created=4_000_000_000_000)),
    "needs a newer client": ("client_too_old", lambda g: edited(g, min_client="9.0.0")),
    "manifest lists too few": ("wrong_members", lambda g: edited(g, members=[])),
    "a member missing": ("wrong_members", lambda g: g.resign({"card.json": b""})),
    "a member unknown": ("wrong_members", lambda g: g.resign({"run.sh": b"#!/bin/sh"})),
    "a member too many": ("wrong_members", lambda g: g.resign({"answers.json": b"{}"}, g.manifest.to_bytes())),
    "size one off": (
        "wrong_hash",
        lambda g: edited(
            g,
            members=[{"name": m.name, "size": m.size + 1, "sha256": m.sha256} for m in g.manifest.members],
        ),
    ),
    "preprocess of an unknown fit": ("bad_preprocess", lambda g: member_edit(g, "preprocess.json", fit="stretch")),
    "preprocess a list": ("bad_preprocess", lambda g: g.resign({"preprocess.json": b"[]"})),
    "classes twice the same": ("bad_labels", lambda g: member_edit(g, "labels.json", classes=["NV", "NV", "BCC"])),
    "classes with a line break": ("bad_labels", lambda g: member_edit(g, "labels.json", classes=["a", "b\n", "c"])),
    "classes with a list": ("bad_labels", lambda g: member_edit(g, "labels.json", classes=["a", "b", ["c"]])),
    "one class": ("bad_labels", lambda g: member_edit(g, "labels.json", classes=["a"], seen=[True])),
    "nothing seen": ("bad_labels", lambda g: member_edit(g, "labels.json", seen=[False] * 3)),
    "seen of another length": ("bad_labels", lambda g: member_edit(g, "labels.json", seen=[True])),
    "seen as numbers": ("bad_labels", lambda g: member_edit(g, "labels.json", seen=[1, 1, 0])),
    "card with a wrong type": ("bad_card", lambda g: member_edit(g, "card.json", temperature="1.5")),
    "temperature 0": ("bad_card", lambda g: member_edit(g, "card.json", temperature=0)),
    "temperature beyond float64": (
        "bad_card",
        lambda g: g.resign({"card.json": g.members["card.json"].replace(b"1.5", b"1e999")}),
    ),
    "card without intended use": ("bad_card", lambda g: member_edit(g, "card.json", intended_use="")),
    "card with a text site count": ("bad_card", lambda g: member_edit(g, "card.json", sites={"a": "many"})),
    "card nested deep": ("bad_card", lambda g: member_edit(g, "card.json", metrics=[[[[[[[[1]]]]]]]])),
    "weights with NaN": ("bad_weights", lambda g: g.resign({"weights.safetensors": nan_weights(g)})),
    "weights cut": ("bad_weights", lambda g: g.resign({"weights.safetensors": b"\x00" * 9})),
    "a tensor too few": (
        "wrong_inputs",
        lambda g: g.resign(
            {"weights.safetensors": write_tensors({k: v for k, v in weights_of(g).items() if k != "prior"}, {})}
        ),
    ),
    "a tensor of another shape": (
        "wrong_inputs",
        lambda g: g.resign(
            {"weights.safetensors": write_tensors({**weights_of(g), "prior": np.ones((3, 1), np.float32)}, {})}
        ),
    ),
    "a tensor of another type": (
        "wrong_inputs",
        lambda g: g.resign({"weights.safetensors": write_tensors({**weights_of(g), "prior": np.ones(3)}, {})}),
    ),
    "an input size that the graph does not take": (
        "wrong_inputs",
        lambda g: member_edit(g, "preprocess.json", size=16),
    ),
    "a class that the graph does not give": (
        "wrong_outputs",
        lambda g: g.resign({"labels.json": Labels(tuple("abcd"), (True,) * 4).to_bytes()}),
    ),
    "a graph that is none": ("bad_graph", lambda g: g.resign({"score.onnx": b"PK\x03\x04"})),
    "an optional graph that is none": ("bad_graph", lambda g: g.resign({"encode.onnx": b"\xff" * 30})),
}


@pytest.mark.parametrize("way", sorted(WAYS_TO_BE_WRONG))
def test_way_to_be_wrong(good: Any, way: str) -> None:
    """docs/security.md checks 26 to 30: each is refused with its own code."""
    expected, make = WAYS_TO_BE_WRONG[way]
    data = make(good)
    assert code_of(lambda: good.load(data)) == expected


def test_a_clock_that_is_behind_is_told_to_a_person(good: Any) -> None:
    """docs/security.md 2.8: dated more than 10 minutes ahead. A machine without a battery may think it is 1970."""
    created = good.manifest.created_ms
    assert load_bundle(good.data, [good.key.public], created - 600_000).manifest == good.manifest
    with pytest.raises(BundleError, match=r"is dated 3 days ahead of this machine's clock; set the clock if it is"):
        load_bundle(good.data, [good.key.public], created - 3 * 86_400_000)
    for now_ms in (0, created - 600_001):
        assert code_of(lambda now=now_ms: load_bundle(good.data, [good.key.public], now)) == "from_future"
    line, version = good.manifest.line_key, good.manifest.version
    assert load_bundle(good.data, [good.key.public], 0, {line: version}).manifest == good.manifest  # it is in use
    older = {line: version - 1}
    assert code_of(lambda: load_bundle(good.data, [good.key.public], 0, older)) == "from_future"


def test_build_refuses_what_would_not_load(good: Any) -> None:
    """The publisher sees the refusal, not the device."""
    assert code_of(lambda: build_bundle({"card.json": b"{}"}, good.fields, [good.key])) == "wrong_members"
    assert code_of(lambda: build_bundle(good.members, replace(good.fields, line="Skin"), [good.key])) == "bad_manifest"
    with pytest.raises(ValueError, match="signing key"):
        build_bundle(good.members, good.fields, [])


def test_unverified_manifest(good: Any) -> None:
    """`inspect` shows claims of any bundle, and still refuses damaged ones."""
    stranger = build_bundle(good.members, good.fields, [OTHER])
    assert unverified_manifest(stranger) == (good.manifest, (OTHER.key_id,))
    assert code_of(lambda: unverified_manifest(good.data[:-1])) == "truncated"
    assert code_of(lambda: unverified_manifest(write_archive({"a.json": b"{}"}))) == "bad_archive"


def test_optional_members(good: Any) -> None:
    """The bundle format: optional members come along unread, graphs among them checked."""
    data = good.resign({"encode.onnx": good.members["score.onnx"], "answers.json": b"[]"})
    assert dict(good.load(data).extras) == {"encode.onnx": good.members["score.onnx"], "answers.json": b"[]"}


def test_records_round_trip(good: Any) -> None:
    """Writing and reading a record gives the same record."""
    bundle = good.load()
    assert parse_manifest(bundle.manifest.to_bytes()) == bundle.manifest
    assert Labels.from_bytes(bundle.labels.to_bytes()) == bundle.labels
    assert Card.from_bytes(bundle.card.to_bytes()) == bundle.card
    for name in ("labels.json", "card.json"):
        with pytest.raises(ValueError, match="exactly"):
            (Labels if name == "labels.json" else Card).from_bytes(b"{}")


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    kind = rng.randrange(6)
    place = rng.randrange(len(changed))
    if kind == 0:
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[place] = (changed[place] + rng.randrange(1, 256)) % 256
    elif kind == 2:
        del changed[place:]
    elif kind == 3:
        del changed[place : place + rng.randrange(1, 20)]
    elif kind == 4:
        changed[place:place] = rng.randbytes(rng.randrange(1, 20))
    else:
        other = rng.randrange(len(changed))
        changed[place : place + 8], changed[other : other + 8] = changed[other : other + 8], changed[place : place + 8]
    return bytes(changed)


@pytest.mark.parametrize(
    "bundles", [pytest.param(1_000, marks=pytest.mark.smaller), pytest.param(5_000, marks=pytest.mark.slow)]
)
def test_mutated_bundles(good: Any, bundles: int) -> None:
    """docs/security.md check 27: 1,000 and 5,000 changed bundles, 0 loaded, every refusal a BundleError.

    A third changes the file, a third a member inside a well-formed archive, a third the manifest or the signatures.
    """
    rng = random.Random(20_260_727)
    members = read_archive(good.data)
    names = [name for name in members if name not in ("manifest.json", "signatures.json")]
    codes: dict[str, int] = {}
    count = 0
    while count < bundles:
        if count % 3 == 0:
            data = mutated(good.data, rng)
        else:
            name = rng.choice(names if count % 3 == 1 else ["manifest.json", "signatures.json"])
            data = write_archive({**members, name: mutated(members[name], rng)})
        if data == good.data:
            continue  # swapped equal bytes
        count += 1
        code = code_of(lambda data=data: good.load(data))
        codes[code] = codes.get(code, 0) + 1
    for expected in ("bad_archive", "truncated", "wrong_hash", "bad_signature", "bad_signatures", "untrusted_key"):
        assert codes.get(expected, 0) > bundles // 500, codes  # every layer was reached
