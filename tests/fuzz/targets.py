"""What is fuzzed: each parser that reads bytes of somebody else, as a function of them, and real examples of its input.

A target returns, or raises an error of ours; `parse_json` and the readers of a bundle's JSON members say `ValueError`,
which their caller turns into a typed one. Anything else is a defect. Where a signature or a checksum stands before the
parser, the target makes it anew over the bytes that it is given, so that they get past it. Where a target reads several
kinds, the first byte says which. Source: docs/security.md check 15, attack list 3, 10 and 11.
"""

import base64
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl_protocol import Payload, SealingKey, SigningKey, unverified_header
from edgefl_protocol.bundle import BundleFields, build_bundle
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan, PromptForm
from edgefl_protocol.bundle.manifest import parse_manifest, parse_signatures
from edgefl_protocol.bundle.model_card import Card, Labels
from edgefl_protocol.bundle.onnx_rules import check_operators
from edgefl_protocol.bundle.onnx_training import read_plan
from edgefl_protocol.bundle.question_table import OtherPicture, QuestionTable, TriedQuestions
from edgefl_protocol.bundle.step_plan import StepPlan
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.envelopes.header import parse_header
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages import blob_messages, key_messages, requests
from edgefl_protocol.pictures.preprocess import Preprocess
from edgefl_protocol.records import coordinator_records, invite, record_form, revocation, root, rotation
from edgefl_protocol.rules.questions import Questions
from edgefl_protocol.strict_json import parse_json
from edgefl_protocol.tensors import read_tensors, write_tensors

VECTORS = Path(__file__).resolve().parent.parent / "vectors"
FOUND = VECTORS / "fuzz"  # inputs that once were a defect, a folder for each target
NOW_MS = 1_790_000_000_000
DAY_MS = 86_400_000
KEY, OTHER = SigningKey(bytes(range(32))), SigningKey(bytes(range(1, 33)))  # public on purpose
BOX = SealingKey(1, bytes(range(32)))
FEDERATION, NONCE = "skin", "0123456789abcdefABCDEF_-"


@dataclass(frozen=True)
class Target:
    """A parser."""

    reads: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]  # each is accepted
    refuses: type[Exception] | tuple[type[Exception], ...] = EdgeflError


def check(target: Target, data: bytes) -> None:
    """Give a target its input; whatever it raises beside its own refusals goes on."""
    with contextlib.suppress(target.refuses):
        target.reads(data)


def _payload(data: bytes) -> object:
    """A payload that is read is written and read again as the same one."""
    found = Payload.from_bytes(data)
    again = found.to_bytes()
    assert Payload.from_bytes(again).to_bytes() == again
    return found


MESSAGES: Sequence[Callable[[Payload], object]] = (
    requests.EnrolRequest.from_payload, requests.EnrolReply.from_payload, requests.EnrolProofRequest.from_payload,
    requests.EnrolProofReply.from_payload, requests.EmptyRequest.from_payload, requests.TaskReply.from_payload,
    requests.BroadcastRequest.from_payload, requests.ReplyRequest.from_payload, requests.ReplyReply.from_payload,
    requests.RecordReply.from_payload, requests.BundleRequest.from_payload, requests.BundleReply.from_payload,
    requests.Refusal.from_payload, blob_messages.read_blob_request, blob_messages.BlobPutReply.from_payload,
    blob_messages.BlobGetReply.from_payload, key_messages.IndexReply.from_payload,
    key_messages.RotateRequest.from_payload, key_messages.RotateReply.from_payload, BlobReference.from_payload,
)  # fmt: skip


def _message(data: bytes) -> object:
    """One that is read is written and read again as the same one."""
    read = MESSAGES[data[0] % len(MESSAGES)] if data else MESSAGES[0]
    found: Any = read(Payload.from_bytes(data[1:]))
    if found is not None:
        assert read(found.to_payload()) == found
    return found


LABELS: Sequence[tuple[str, Callable[[bytes], object]]] = (
    (coordinator_records.TIME_LABEL, lambda record: coordinator_records.verify_time(record, KEY.public_key, NONCE)),
    (coordinator_records.INDEX_LABEL,
     lambda record: coordinator_records.verify_index(record, KEY.public_key, FEDERATION, NOW_MS)),
    (coordinator_records.KEYS_LABEL,
     lambda record: coordinator_records.verify_key_record(record, KEY.key_id, FEDERATION, NOW_MS)),
    (revocation.REVOKED_LABEL, lambda record: revocation.verify_revoked(record, KEY.public_key, FEDERATION, NOW_MS)),
)  # fmt: skip


def _signed_record(data: bytes) -> object:
    """The first byte says which record, the rest is its body."""
    label, read = LABELS[data[0] % len(LABELS)] if data else LABELS[0]
    body = data[1:]
    parts = (body, KEY.sign(label, body))
    return read(b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts))


def _several(data: bytes) -> object:
    """A body that the old and the new key signed, or one of a root set."""
    body = data[1:]
    if data[:1] == b"\0":
        return root.unverified_root(_joined(body, root.ROOT_LABEL))
    return rotation.verify_rotation(_joined(body, rotation.ROTATION_LABEL), FEDERATION)


def _joined(body: bytes, label: str) -> bytes:
    signed = sorted(bytes.fromhex(key.key_id) + key.sign(label, body) for key in (KEY, OTHER))
    return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (body, *signed))


def _record_text(data: bytes) -> object:
    """The form of a record, its signatures not looked at."""
    with contextlib.suppress(EdgeflError):
        record_form.parse(record_form.split(data)[0])
    return record_form.parse(record_form.split_several(data)[0])


def _invite(data: bytes) -> object:
    """A record with the right checksum; where the first byte is 0, the text itself."""
    if data[:1] == b"\0":
        return invite.decode_invite(data[1:].decode("utf-8", "replace"), NOW_MS)
    whole = data[1:] + invite._checksum(data[1:])
    return invite.decode_invite(invite.PREFIX + base64.urlsafe_b64encode(whole).rstrip(b"=").decode(), NOW_MS)


JSON_MEMBERS: Sequence[tuple[str, Callable[[bytes], object]]] = (
    ("labels.json", Labels.from_bytes), ("card.json", Card.from_bytes), ("questions.json", QuestionTable.from_bytes),
    ("training.json", read_plan), ("preprocess.json", lambda data: Preprocess.from_json(_object(data))),
)  # fmt: skip


def _object(data: bytes) -> dict[str, Any]:
    found = parse_json(data)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _json_member(data: bytes) -> object:
    """The first byte says which member of a bundle, the rest is its content."""
    return JSON_MEMBERS[data[0] % len(JSON_MEMBERS)][1](data[1:]) if data else None


def _bundle(data: bytes) -> object:
    """A bundle that is well signed and of which one member is the input; the first byte says which."""
    members = _members()
    name = sorted(members)[data[0] % len(members)] if data else "card.json"
    return build_bundle({**members, name: data[1:]}, FIELDS, [KEY])


FIELDS = BundleFields(
    federation="demo", line="skin", task="all", version=3, created_ms=NOW_MS, expires_ms=NOW_MS + DAY_MS
)


def _members() -> dict[str, bytes]:
    members = read_archive((VECTORS / "bundles/format1.edgefl").read_bytes())
    return {name: data for name, data in members.items() if name not in ("manifest.json", "signatures.json")}


def _signed_part(name: str) -> list[bytes]:
    return [read_archive((VECTORS / "bundles/format1.edgefl").read_bytes())[name]]


def _golden() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((VECTORS / "envelopes/envelopes.json").read_text())["cases"]
    return [case for case in cases if case["verdict"] == "accept"]


def _envelopes() -> list[bytes]:
    return [base64.b64decode(case["envelope"]) for case in _golden()]


def _headers() -> list[bytes]:
    return [one[7 : 7 + int.from_bytes(one[5:7], "little")] for one in _envelopes()]


def _payloads() -> list[bytes]:
    """Of every type of array, with and without elements, and of every type of scalar."""
    kinds = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
    arrays = {kind: np.ones((2, 3), kind) for kind in kinds} | {"none": np.ones((0, 4)), "one": np.array(1.5)}
    return [one.to_bytes() for one in (Payload(), Payload(arrays, {"i": -7, "f": 0.5, "s": "warm µ"}))]


def _tensor_files() -> list[bytes]:
    return [*_payloads(), write_tensors({}, {"a": "b"}), _members()["weights.safetensors"]]


def _messages() -> list[bytes]:
    reference = BlobReference(blob="0" * 32, size=200_000, sha256="0" * 64, key=bytes(32))
    reply = Payload({"maps.0": np.ones((1, 4), np.float16)}, {"site_sha256": "0" * 64})
    task = requests.TaskReply(
        method="fedevprompt", task="nevus", line="main", classes=("nevus", "other"), rounds=5, round=2, phase="train",
        state="open", deadline_ms=NOW_MS, tokens=49, maps_per_class=5, quorum_min=2, quorum_target=4,
        max_reply_bytes=2**24, replied=True, train_rounds=4, epochs=2, seed=7, settings={"m": 5, "b": (5, 6)},
        travels=("maps",), state_sha256="0" * 64, backbone={"name": "x", "image_px": 84}, stuck="round 2 is stuck",
    )  # fmt: skip
    made: list[Any] = [
        requests.EnrolRequest(idem="i" * 16, token=b"t" * 32, name="clinic-a", role="site",
                              signing_public=KEY.public, sealing_suite=1, sealing_public=BOX.public),
        requests.EnrolReply(state="pending", nonce=b"n" * 32),
        requests.EnrolProofRequest(idem="i" * 16, nonce=b"n" * 32),
        requests.EnrolProofReply(state="approved", fingerprint="0123456789ABCDEFGHJK"),
        requests.EmptyRequest(), task, requests.BroadcastRequest(round=3),
        requests.ReplyRequest(idem="i" * 16, reply=reply), requests.ReplyReply(accepted=True, first_answer_ms=NOW_MS),
        requests.RecordReply(record=b"body.signature"), requests.BundleRequest(line="main", task="nevus", version=7),
        requests.BundleReply(bundle=bytes(range(64))), requests.Refusal(code="seq_behind", message="so", highest=9),
        blob_messages.BlobPut(blob="0" * 32, size=100, sha256="0" * 64, offset=0, data=bytes(20)),
        blob_messages.BlobPutReply(have=20, piece_bytes=2**20), blob_messages.BlobGetReply(data=bytes(20)),
        key_messages.IndexReply(index=b"a.b", revoked=b"c.d"),
        key_messages.RotateRequest(idem="i" * 16, record=b"a.b.c"),
        key_messages.RotateReply(old_until_ms=NOW_MS, fingerprint="0123456789ABCDEFGHJK"), reference,
    ]  # fmt: skip
    found = [bytes([place]) + one.to_payload().to_bytes() for place, one in enumerate(made)]
    return [*found, b"\x07" + requests.ReplyRequest(idem="i" * 16, reply=reference).to_payload().to_bytes()]


def _records() -> list[bytes]:
    """Bodies, each behind the byte that says which."""
    entry = coordinator_records.IndexEntry(line="main", task="all", version=12, sha256="0" * 64, size=5000)
    ends = NOW_MS + DAY_MS
    made = (
        coordinator_records.make_time(KEY, NONCE, NOW_MS),
        coordinator_records.make_index(KEY, FEDERATION, [entry], NOW_MS, ends),
        coordinator_records.make_key_record(KEY, FEDERATION, BOX.public_key, 3, NOW_MS, ends),
        revocation.make_revoked(KEY, FEDERATION, 4, ["0" * 64, "f" * 64], NOW_MS, ends),
    )
    return [bytes([place]) + record_form.split(one)[0] for place, one in enumerate(made)]


def _two_signers() -> list[bytes]:
    return [record_form.split_several(one)[0] for one in _several_records()]


def _several_records() -> list[bytes]:
    found = root.Root(
        federation=FEDERATION, version=1, issued_ms=NOW_MS, expires_ms=NOW_MS + DAY_MS, root_keys=(KEY.public_key,),
        coordinators=(OTHER.public_key,),
    )  # fmt: skip
    changed = rotation.make_rotation(KEY, OTHER, BOX.public_key, FEDERATION, NOW_MS)
    return [root.make_root(found, [KEY, OTHER]), changed]


def _invites() -> list[bytes]:
    made = invite.Invite(
        url="https://coordinator.example:8443/fl", federation=FEDERATION, coordinator_key_id=KEY.key_id,
        root_key_id=OTHER.key_id, tls_sha256="0" * 64, token=bytes(32), name="clinic-a", role="device",
        expires_ms=NOW_MS + DAY_MS,
    )  # fmt: skip
    text = invite.encode_invite(made, NOW_MS)
    encoded = text.removeprefix(invite.PREFIX)
    return [b"\0" + text.encode(), b"\1" + base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))[:-4]]


def _json_members() -> list[bytes]:
    plan = StepPlan(
        kind="headavg", settings={"lr": 0.25, "loss": "ce"}, fixed={"readout": "cls"}, defaults={"lr": 0.1},
        state={"head.bias": ("float32", (3,)), "optimizer.step": ("int64", ())}, figures=("loss",),
        given={"image": ("uint8", (None, 6, 6, 3))}, needs_labels=True, frozen_sha256="5a" * 32, batch=8, epochs=2,
        balance="none", seed=4,
    )  # fmt: skip
    form = PromptForm(
        network="0" * 64, prompts="bt", b_blocks=3, prompt_length=9, prefix="after", evidence="softplus",
        readout="cls", head_norm="none", rollout="renormalise", kd_metric="bilinear",
    )  # fmt: skip
    prompts = FedEvPromptPlan(
        trained=("head.weight", "head.bias"), rates={"head.weight": 0.5, "head.bias": 0.1}, weight_decay=0.01, batch=4,
        epochs=2, epochs_before=0, anneal_epochs=10, anneal_clock="run", kd_weight=1e-6, kd_peers="sum",
        prior_floor=0.01, balance="none", augment="dihedral", seed=3, form=form,
    )  # fmt: skip
    tried = TriedQuestions(
        questions=9, right=5, answered=6, answered_right=4, other_picture=OtherPicture(right=2, low=0.1, high=0.5)
    )
    questions = QuestionTable(Questions(("what", "is", "?"), 5), tried, (True, True, False)).to_bytes()
    found = {**_members(), "training.json": plan.to_bytes(), "questions.json": questions}
    made = [bytes([place]) + found[name] for place, (name, _) in enumerate(JSON_MEMBERS)]
    return [*made, b"\x03" + prompts.to_bytes()]


def _bundle_members() -> list[bytes]:
    members = _members()
    return [bytes([place]) + members[name] for place, name in enumerate(sorted(members))]


JSON_ERRORS = (EdgeflError, ValueError)
TARGETS: Mapping[str, Target] = {
    "header": Target(parse_header, _headers),
    "envelope": Target(unverified_header, _envelopes),
    "tensors": Target(lambda data: read_tensors(data, max_bytes=2**20), _tensor_files),
    "payload": Target(_payload, _payloads),
    "message": Target(_message, _messages),
    "record": Target(_signed_record, _records),
    "root_or_rotation": Target(_several, lambda: [bytes([n]) + one for n, one in enumerate(_two_signers())]),
    "record_text": Target(_record_text, _several_records),
    "invite": Target(_invite, _invites),
    "json": Target(parse_json, lambda: [one[1:] for one in _json_members()], ValueError),
    "manifest": Target(parse_manifest, lambda: _signed_part("manifest.json")),
    "signatures": Target(parse_signatures, lambda: _signed_part("signatures.json")),
    "json_member": Target(_json_member, _json_members, JSON_ERRORS),
    "graph": Target(check_operators, lambda: [_members()["score.onnx"]]),
    "archive": Target(read_archive, lambda: [(VECTORS / "bundles/format1.edgefl").read_bytes()]),
    "bundle": Target(_bundle, _bundle_members),
}
