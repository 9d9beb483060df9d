"""A signed model package for devices: `load_bundle` returns a verified `Bundle` or raises `BundleError`.

The checks run in this order and the first that fails decides; nothing of a step is used before the steps above it held:

    (1) size, and a canonical stored archive                          too_large, truncated, bad_archive
    (2) manifest.json and signatures.json are there, the latter a strict list    bad_archive, bad_signatures
    (3) at least `threshold` trusted keys signed the manifest's bytes  no_trusted_key, untrusted_key, bad_signature
    (4) the manifest is the strict record of a known format           unknown_format, bad_manifest
    (5) in time, readable by this version, not older than one seen    expired, from_future, client_too_old,
                                                                      rolled_back
    (6) members are exactly those of the manifest, from the known names, with its sizes and SHA-256   wrong_members,
                                                                      wrong_hash
    (7) preprocess, labels, card and questions are the strict records    bad_preprocess, bad_labels, bad_card,
                                                                      bad_questions
    (8) weights are finite tensors in bounds                          bad_weights
    (9) every graph is self-contained, of allowed operators; the scoring graph takes these weights and gives the
        documented outputs, among them the map that the card speaks of    external_data, bad_graph,
                                                                      forbidden_operator, wrong_inputs, wrong_outputs
    (10) a training graph has its record, takes what that names and gives it back; a bundle that answers questions
         has none                                                     wrong_members, bad_training, wrong_inputs,
                                                                      wrong_outputs

A file is identified by its SHA-256, a model by `id` = federation/line/task with its version. Verified bytes, never a
path, go to the runtime. `build_bundle` gives the same bytes for the same input, and checks them with `load_bundle`.

Source: docs/security.md 2.8, attack list 1 to 5 and 10, checks 26 to 31.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from numpy.typing import NDArray

from edgefl_protocol.bundle.archive import Archive, open_archive, read_archive, write_archive
from edgefl_protocol.bundle.learning_plan import GRAPH, RECORD, LearningPlan, ScoreFacts
from edgefl_protocol.bundle.manifest import (
    CLIENT_VERSION,
    OPTIONAL_MEMBERS,
    REQUIRED_MEMBERS,
    SIGNING_LABEL,
    BundleFields,
    BundleMember,
    Manifest,
    Signature,
    check_validity,
    parse_manifest,
    parse_signatures,
    write_signatures,
)
from edgefl_protocol.bundle.manifest import check_update as check_update
from edgefl_protocol.bundle.model_card import Card, Labels, referral_rules
from edgefl_protocol.bundle.onnx_rules import check_operators, check_score_graph
from edgefl_protocol.bundle.onnx_training import check_graphs, read_plan
from edgefl_protocol.bundle.onnx_wire import Graph, TensorType
from edgefl_protocol.bundle.question_table import MEMBER, QuestionTable
from edgefl_protocol.envelopes.keys import PublicSigningKey, SigningKey
from edgefl_protocol.errors import BundleError, PayloadError, SignatureError
from edgefl_protocol.pictures.preprocess import Preprocess
from edgefl_protocol.sentences import counted
from edgefl_protocol.strict_json import UnknownKeysError, parse_json
from edgefl_protocol.tensors import read_tensors

MAX_WEIGHTS_BYTES = 256 * 1024 * 1024

_MANIFEST = "manifest.json"
_SIGNATURES = "signatures.json"
_TRUST_IT = (
    "if you know that key, name it with --trust PUB (`score` and `ask`: for this call; `use`: from now on), or run "
    "`edgefl trust add PUB`"
)
_T = TypeVar("_T")


@dataclass(frozen=True)
class SignedManifest:
    """What was signed, and by whom it claims to be."""

    data: bytes  # the manifest's bytes
    signatures: tuple[Signature, ...]  # all that the bundle brings, also those of keys that are not trusted


@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """A verified bundle. Only `load_bundle` makes one."""

    manifest: Manifest  # the signed record
    signed: SignedManifest  # it as it came, so that its signatures can be verified again (`verified_again`)
    preprocess: Preprocess  # how a photograph becomes the input
    labels: Labels  # classes, and which of them training saw
    card: Card  # the model card
    score_onnx: bytes  # the scoring graph, for the runtime
    weights: Mapping[str, NDArray[Any]]  # tensors by name (read-only), the graph's inputs besides `image`
    # optional members that are there, by name (`train_step.onnx`, `training.json`, `encode.onnx`, `questions.json`)
    extras: Mapping[str, bytes]
    outputs: tuple[str, ...]  # names of the scoring graph's outputs, in order
    sha256: str  # of the file, 64 hex digits
    signers: tuple[str, ...]  # key ids of the trusted keys whose signatures held
    training: LearningPlan | None = (
        None  # how a device learns with `train_step.onnx`; None where the bundle only scores
    )
    questions: QuestionTable | None = None  # the words it knows; None for a bundle that scores pictures alone

    @property
    def id(self) -> str:
        """federation/line/task, `-` for no federation; the same for every version."""
        return self.manifest.id


def load_bundle(
    data: bytes | Archive,
    trust: Iterable[bytes],
    now_ms: int,
    last_seen: Mapping[tuple[str | None, str, str], int] | None = None,
    *,
    threshold: int = 1,
) -> Bundle:
    """Verify a bundle.

    Args:
        data: the whole `.edgefl` file, or what `open_archive` made of it (step 1).
        trust: Ed25519 public keys of bundle signers, 32 bytes each.
        now_ms: milliseconds since 1970 (UTC).
        last_seen: (federation, line, task) to the highest version seen on this device; a lower one is refused.
        threshold: how many different trusted keys must have signed.

    Raises:
        BundleError: the bundle is refused; `code` names the check.
        KeyMaterialError: an entry of `trust` is not a usable key.
        ValueError: `threshold` is below 1.
    """
    if threshold < 1:
        raise ValueError(f"threshold is {threshold}; at least one signature is needed")
    archive = data if isinstance(data, Archive) else open_archive(io.BytesIO(data))  # (1)
    members = dict(archive.members)
    if list(members)[:2] != [_MANIFEST, _SIGNATURES]:  # (2)
        raise BundleError("the archive does not begin with its manifest and signatures; fetch it again", "bad_archive")
    signed = SignedManifest(members.pop(_MANIFEST), parse_signatures(members.pop(_SIGNATURES)))
    signers = _verify(signed, trust, threshold)  # (3)
    manifest = parse_manifest(signed.data)  # (4)
    check_validity(manifest, now_ms, last_seen)  # (5)
    _check_members(manifest, members, archive.hashes)  # (6)
    preprocess = _read("preprocess", _preprocess, members["preprocess.json"])  # (7)
    labels = _read("labels", Labels.from_bytes, members["labels.json"])
    card = _read("card", partial(_card, labels), members["card.json"])
    questions = _read("questions", QuestionTable.from_bytes, members[MEMBER]) if MEMBER in members else None
    weights = _weights(members["weights.safetensors"])  # (8)
    words = None if questions is None else questions.vocabulary.length
    graph = check_score_graph(members["score.onnx"], weights, preprocess.size, labels.classes, words)  # (9)
    _check_map(card, graph.outputs, asked=questions is not None)
    extras = {name: content for name, content in members.items() if name in OPTIONAL_MEMBERS}
    graphs = {name: check_operators(content) for name, content in extras.items() if name.endswith(".onnx")}
    types = {name: TensorType(array.dtype.name, array.shape) for name, array in weights.items()}
    training = _training(members, graphs, ScoreFacts(types, graph.outputs, preprocess.size))  # (10)
    return Bundle(
        manifest=manifest,
        signed=signed,
        preprocess=preprocess,
        labels=labels,
        card=card,
        score_onnx=members["score.onnx"],
        weights=MappingProxyType(weights),
        extras=MappingProxyType(extras),
        outputs=tuple(graph.outputs),
        sha256=archive.sha256,
        signers=signers,
        training=training,
        questions=questions,
    )


def verified_again(bundle: Bundle, trust: Iterable[bytes]) -> Bundle:
    """Verify the signatures of a verified bundle (step 3) under the keys that are trusted now, one of them at least.

    Its bytes cannot have changed; its date and version are not asked for again.

    Returns:
        The bundle, with those of these keys as `signers` that signed it.

    Raises:
        BundleError: none of them did, or a signature of one of them is wrong.
        KeyMaterialError: an entry of `trust` is not a usable key.
    """
    return replace(bundle, signers=_verify(bundle.signed, trust, 1))


def _check_map(card: Card, outputs: Mapping[str, TensorType], *, asked: bool) -> None:
    """Step 9: the map that the card speaks of is there; `map` is a rollout, or attention where questions are asked."""
    said = card.map
    if said is None or not said.shown or said.kind in (None, "occlusion"):
        return
    if "shown" not in outputs and (said.kind != ("attention" if asked else "rollout") or "map" not in outputs):
        raise BundleError(
            f"the card describes a map of kind {said.kind}, which score.onnx does not give", "wrong_outputs"
        )


def _training(members: Mapping[str, bytes], graphs: Mapping[str, Graph], score: ScoreFacts) -> LearningPlan | None:
    """Read the record of learning and check its graphs by it (step 10); None where the bundle brings neither."""
    if (GRAPH in members) != (RECORD in members):
        raise BundleError(f"a bundle has both {GRAPH} and {RECORD} or neither; build it again", "wrong_members")
    if RECORD not in members:
        return None
    if MEMBER in members:
        raise BundleError("no device learns a model that answers questions; build it without training", "wrong_members")
    plan = _read("training", read_plan, members[RECORD])
    check_graphs(graphs, plan, score)
    return plan


def _weights(data: bytes) -> dict[str, NDArray[Any]]:
    """Read the scored values: finite tensors in bounds (step 8)."""
    try:
        weights, _ = read_tensors(data, max_bytes=MAX_WEIGHTS_BYTES)
    except PayloadError as error:
        raise BundleError(f"weights.safetensors is refused: {error}; build the bundle again", "bad_weights") from error
    return weights


def build_bundle(members: Mapping[str, bytes], fields: BundleFields, signers: Sequence[SigningKey]) -> bytes:
    """Build and sign a bundle; the same input gives the same bytes.

    Args:
        members: name to content: the required members, and any of the optional ones.
        signers: keys to sign with, at least one.

    Returns:
        The `.edgefl` file, which `load_bundle` accepts under every one of these keys.

    Raises:
        BundleError: the result would not load; `code` names the check.
        ValueError: no signer.
    """
    if not signers:
        raise ValueError("a bundle needs at least one signing key")
    listed = tuple(
        BundleMember(name, len(members[name]), hashlib.sha256(members[name]).hexdigest()) for name in sorted(members)
    )
    signed = Manifest(**vars(fields), members=listed).to_bytes()
    ordered = sorted(signers, key=lambda key: key.key_id)
    signatures = [Signature(key.key_id, "ed25519", key.sign(SIGNING_LABEL, signed)) for key in ordered]
    content = {_MANIFEST: signed, _SIGNATURES: write_signatures(signatures)}
    data = write_archive({**content, **{name: members[name] for name in sorted(members)}})
    load_bundle(data, [key.public for key in signers], fields.created_ms, threshold=len(signers))
    return data


def unverified_manifest(data: bytes) -> tuple[Manifest, tuple[str, ...]]:
    """Read what a bundle claims, before any signature is checked: to show it, never to act on it.

    Returns:
        The manifest and the key ids that claim to have signed it.

    Raises:
        BundleError: steps 1, 2 or 4 failed.
    """
    members = read_archive(data)
    if not {_MANIFEST, _SIGNATURES} <= set(members):
        raise BundleError("the archive lacks its manifest or signatures; fetch it again", "bad_archive")
    signatures = parse_signatures(members[_SIGNATURES])
    return parse_manifest(members[_MANIFEST]), tuple(signature.keyid for signature in signatures)


def _verify(signed: SignedManifest, trust: Iterable[bytes], threshold: int) -> tuple[str, ...]:
    """Give the ids of the trusted keys that signed; a trusted key's wrong signature refuses the whole bundle."""
    claimed = [signature for signature in signed.signatures if signature.alg == "ed25519"]
    named = ", ".join(signature.keyid for signature in claimed) or "no Ed25519 key"
    given = tuple(trust)
    keys = {key.key_id: key for key in map(PublicSigningKey, given)}
    if not keys:
        raise BundleError(
            f"no signer is trusted yet; the bundle is signed by {named}: {_TRUST_IT}",
            "no_trusted_key",
        )
    signers: list[str] = []
    for signature in claimed:
        if signature.keyid in keys:
            try:
                keys[signature.keyid].verify(signature.sig, SIGNING_LABEL, signed.data)
            except SignatureError as error:
                raise BundleError(
                    f"key {signature.keyid} did not sign this manifest: the bundle was changed; fetch it again",
                    "bad_signature",
                ) from error
            signers.append(signature.keyid)
    if len(signers) < threshold:
        ids = {key.hex() for key in given} & {signature.keyid for signature in claimed}
        told = f" {min(ids)} was trusted as a key, but it is the id of one: trust the key itself." if ids else ""
        raise BundleError(
            f"{counted(len(signers), 'trusted key')} signed the bundle, but {threshold} must; it is signed by "
            f"{named}: {_TRUST_IT}{'.' if told else ''}{told}",
            "untrusted_key",
        )
    return tuple(signers)


def _check_members(manifest: Manifest, members: Mapping[str, bytes], hashes: Mapping[str, str]) -> None:
    listed = [member.name for member in manifest.members]
    if listed != list(members):
        odd = ", ".join(sorted(set(listed) ^ set(members))) or "their order"
        raise BundleError(f"the archive and its manifest differ in {odd[:300]}; fetch it again", "wrong_members")
    missing, unknown = REQUIRED_MEMBERS - set(listed), set(listed) - REQUIRED_MEMBERS - OPTIONAL_MEMBERS
    if missing or unknown:
        lists = [", ".join(sorted(names))[:300] or "none" for names in (missing, unknown)]
        advice = "build the bundle again" if missing else f"update edgefl-derm, this is {CLIENT_VERSION}"
        raise BundleError(
            f"members that are missing: {lists[0]}; members that are unknown: {lists[1]}; {advice}", "wrong_members"
        )
    for member in manifest.members:
        if len(members[member.name]) != member.size or hashes[member.name] != member.sha256:
            raise BundleError(f"{member.name} is not the file that was signed; fetch the bundle again", "wrong_hash")


def _preprocess(data: bytes) -> Preprocess:
    record = parse_json(data)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    return Preprocess.from_json(record)


def _card(labels: Labels, data: bytes) -> Card:
    """Read the card, its thresholds too: before anything takes the bundle up."""
    card = Card.from_bytes(data)
    referral_rules(labels, card)
    return card


def _read(name: str, reader: Callable[[bytes], _T], data: bytes) -> _T:
    try:
        return reader(data)
    except ValueError as error:
        raise BundleError(f"{name}.json is refused: {error}; {_way_out(error)}", f"bad_{name}") from error


def _way_out(error: ValueError) -> str:
    """What to do about a signed record that is not of the form: `build_bundle` makes none, so another version did."""
    if isinstance(error, UnknownKeysError):
        return f"update edgefl-derm, this is {CLIENT_VERSION}"
    return f"build the bundle again, or update edgefl-derm, this is {CLIENT_VERSION}, if a newer one built it"
