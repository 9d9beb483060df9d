"""What a device is and has: model, values in use, membership, round, outbox. `edgefl status` prints it."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from edgefl_client.doctor.findings import DAY_MS
from edgefl_client.doctor.home_checks import UNKNOWN_KEYS
from edgefl_client.home import Home
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.policy import load_policy
from edgefl_client.sharing.silent import why_silent
from edgefl_client.sharing.waiting_items import list_waiting
from edgefl_client.trust import models
from edgefl_client.trust.signers import Signers, signers_in_force
from edgefl_exchange.errors import ExchangeError, NotEnrolled, TlsRefused, Unavailable
from edgefl_exchange.identity import Identity
from edgefl_exchange.membership import load_membership, load_task
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import BundleError, StorageError
from edgefl_protocol.payload import digest
from edgefl_protocol.sentences import counted, expiry, listed
from edgefl_protocol.strict_json import parse_json

if TYPE_CHECKING:
    from edgefl_protocol.bundle import Labels
    from edgefl_protocol.bundle.question_table import QuestionTable

LEARN_AGAIN = "edgefl train or edgefl sync learns a round and judges it anew"


def run_status(device: Device, *, online: bool) -> dict[str, Any]:
    """Collect what this device is and has; ask the coordinator only where `online`."""
    home = device.home
    signers = signers_in_force(home)
    report: dict[str, Any] = {
        "home": str(home.root),
        "trusted_signers": len(signers.keys),
        "model": None,
        "personal": None,
        "learning": None,
        "membership": None,
        "round": None,
        "silent": None,
        "waiting": 0,
        "coordinator": None,
        "policy": load_policy(home).to_json(),
    }
    if home.current_file.exists():
        report["model"] = _model(home, signers, device.clock_ms())
    report["personal"], report["learning"] = personal_facts(home), _learning(home)
    try:
        membership = load_membership(home.member)
    except NotEnrolled:
        return report | {"waiting": len(list_waiting(home, device.clock_ms()))}
    if online and membership.state != "joining":
        try:
            with device.member() as member:
                task = member.task()
                membership = member.membership
            report["round"] = {
                "number": task.round,
                "state": task.state,
                "replied": task.replied,
                "refused": task.refused,
                "stuck": task.stuck or None,
            }
            report["coordinator"] = {"reachable": True, "error": None}
        except ExchangeError as error:
            report["coordinator"] = {
                "reachable": not isinstance(error, Unavailable | TlsRefused),  # a refusal is an answer
                "error": {"code": error.code, "message": str(error)},
            }
    report["membership"] = {
        "url": membership.url,
        "federation": membership.federation,
        "name": membership.name,
        "role": membership.role,
        "state": membership.state,
        "fingerprint": membership.fingerprint,
        "keys_known": not load_membership(home.member).unknown_ms,  # as the last answer said, which nobody signed
    }
    with suppress(StorageError):  # a damaged record is the doctor's to tell
        known = load_task(home.member)
        silent = None if known is None else why_silent(home, known, device.clock_ms())
        report["silent"] = None if silent is None else str(silent)
    if home.outbox_file.exists():
        with Identity(home.member, device.passphrase) as identity, device.outbox(identity) as outbox:
            report["waiting"] = outbox.count()
    return report


def _model(home: Home, signers: Signers, now_ms: int) -> dict[str, Any]:
    """Read the bundle in use, its age and its card; nothing is verified here, for nothing is run."""
    from edgefl_protocol.bundle import Card, Labels, unverified_manifest
    from edgefl_protocol.bundle.archive import read_archive
    from edgefl_protocol.bundle.card_words import card_lines
    from edgefl_protocol.bundle.question_table import MEMBER, QuestionTable

    file = models.current_file(home)
    told: dict[str, Any] = {"file": str(file), "sha256": file.stem, "revoked": None}
    try:
        data = read_bounded(file, models.MAX_BUNDLE_FILE_BYTES)
        (manifest, claimed), members = unverified_manifest(data), read_archive(data)
        card, labels = Card.from_bytes(members["card.json"]), Labels.from_bytes(members["labels.json"])
        questions = QuestionTable.from_bytes(members[MEMBER]) if MEMBER in members else None
    except (StorageError, BundleError, KeyError, ValueError):  # `edgefl doctor` says what is wrong with it
        names = ("id", "name", "version", "classes", "questions", "age_days", "expires_in_days", "expiry")
        unknown = dict.fromkeys(names)
        return told | unknown | {"quality": [], "card": None}
    return told | {
        "revoked": signers.all_revoked(claimed),
        "id": manifest.id,
        "name": manifest.name,
        "version": manifest.version,
        "classes": list(labels.classes),
        "questions": None if questions is None else _question_facts(labels, questions),
        "age_days": max(now_ms - manifest.created_ms, 0) // DAY_MS,
        "expires_in_days": None if manifest.expires_ms is None else (manifest.expires_ms - now_ms) // DAY_MS,
        "expiry": None if manifest.expires_ms is None else expiry(manifest.expires_ms - now_ms),
        "quality": card_lines(card, labels, questions),
        "card": parse_json(members["card.json"]),
    }


def _question_facts(labels: "Labels", questions: "QuestionTable") -> dict[str, Any]:
    """Count what a model knows of questions, and name the answers that it can give: those that it met in its own."""
    met = [name for name, seen in zip(labels.classes, labels.seen, strict=True) if seen]
    return {"answers": len(labels.classes), "words": len(questions.vocabulary.words), "met": met}


def personal_facts(home: Home) -> dict[str, Any] | None:
    """Describe the values learned here, and whether the bundle in use is theirs; None where none passed their gate."""
    if not home.learning.exists():
        return None
    from edgefl_client.scoring.personal import kept_personal
    from edgefl_client.scoring.untaught import UNTAUGHT, untaught_in_use

    state = kept_personal(home)
    if state is None:
        return None
    used = state.passed and state.bundle_sha256 == models.current_sha256(home)
    return {
        "in_use": used,
        "bundle_sha256": state.bundle_sha256,
        "sha256": digest(state.weights),
        "round": state.round,
        "images": state.images,
        "gate": None if state.verdict is None else state.verdict.to_json(),
        **(untaught_in_use(home, state.seen) if used else dict.fromkeys(UNTAUGHT)),
    }


def _learning(home: Home) -> dict[str, Any] | None:
    """Name the pictures that `edgefl sync` learns from, and the last live round whose reply counted; None for none."""
    if not home.learning.exists():
        return None
    from edgefl_client.learning.live_round import counted_round
    from edgefl_client.learning.own_pictures import remembered_table

    table = remembered_table(home)
    if table is None:
        return None
    try:
        federation = load_membership(home.member).federation
    except NotEnrolled:
        federation = ""
    return {"table": str(table.file), "counted_round": counted_round(home, federation) if federation else 0}


def status_text(report: dict[str, Any]) -> str:
    """Write a status for a person, a line per thing."""
    member, model, turn, asked = (report[key] for key in ("membership", "model", "round", "coordinator"))
    lines = [
        f"home: {report['home']}",
        _model_text(model),
        *([] if model is None or not model["classes"] else [f"  {_knows(model)}"]),
        *([] if model is None else [f"  {line}" for line in model["quality"]]),
        *([] if model is None and report["personal"] is None else weights_lines(report["personal"])),
        *([f"learns from: {report['learning']['table']}"] if report["learning"] else []),
        f"trusted signers: {report['trusted_signers']}",
        f"may leave: {', '.join(report['policy']['allowed']) or 'nothing'}",
    ]
    if member is None:
        lines.append("member of no federation; to join one: edgefl enrol INVITE")
        left = f"waiting in the outbox: {report['waiting']}, of a membership that is gone: edgefl enrol drops them"
        return "\n".join([*lines, *([left] if report["waiting"] else [])])
    unsure = " when the coordinator last said so" if asked is not None and not asked["reachable"] else ""
    lines.append(f"member: {member['name']} ({member['role']}) of {member['federation']}, {member['state']}{unsure}")
    if member["state"] == "pending":
        lines.append(f"fingerprint for the operator: {member['fingerprint']}")
    if turn is not None:
        reply = "refused" if turn["refused"] else "sent" if turn["replied"] else "not sent"
        over = f"the federation is over; its last round, {turn['number']}, is done"
        where = over if turn["state"] == "done" else f"{turn['number']}, {turn['state']}"
        lines.append(f"round: {where}, reply {reply}")
        lines += [turn["stuck"]] if turn["stuck"] else []
    lines += [report["silent"]] if report["silent"] else []
    if report["learning"] and report["learning"]["counted_round"]:
        lines.append(f"last round learned here that counted: {report['learning']['counted_round']}")
    if asked is not None and asked["error"] is not None:
        lines.append(f"coordinator: {asked['error']['message']}")
    lost = "" if member["keys_known"] or not report["waiting"] else f"; {UNKNOWN_KEYS}: see edgefl doctor"
    return "\n".join([*lines, f"waiting in the outbox: {report['waiting']}{lost}"])


def _knows(model: dict[str, Any]) -> str:
    """Name the classes of a model, or the first of the answers that it can give."""
    if model["questions"] is None:
        return f"classes: {listed(model['classes'])}"
    return f"answers: {listed(model['questions']['met'])}"


def card_text(report: dict[str, Any]) -> str:
    """Write the card of the model in use, indented.

    Raises:
        StorageError: no model is in use, or its file cannot be read.
    """
    model = report["model"]
    if model is None or model["card"] is None:
        raise StorageError("there is no card to show: " + _model_text(model), "no_model")
    return json.dumps(model["card"], ensure_ascii=False, indent=2)


def _model_text(model: dict[str, Any] | None) -> str:
    if model is None:
        return "model: none"
    if model["age_days"] is None:
        return f"model: {model['file']}, which cannot be read; see edgefl doctor"
    ends = "" if model["expiry"] is None else f", {model['expiry']}"
    published = f"published {counted(model['age_days'], 'day')} ago{ends}"
    if model["revoked"]:
        published = "revoked by the federation: this device cannot score until edgefl sync brings another"
    return f"model: {model['name']} version {model['version']}, {published}, {model['file']}"


def weights_lines(personal: dict[str, Any] | None) -> list[str]:
    """Say which values score, and which classes these never predict."""
    never = None if personal is None else personal["never_predicts"]
    return [f"weights: {_weights_text(personal)}", *([] if never is None else [f"  {never}"])]


def _weights_text(personal: dict[str, Any] | None) -> str:
    """Say which values `edgefl score` uses unless it is told otherwise."""
    from edgefl_client.scoring.learning_verdict_words import verdict_line

    if personal is None:
        return "the bundle's"
    learned = f"round {personal['round']}, learned from {counted(personal['images'], 'picture')}"
    if personal["in_use"]:
        return f"personal, {learned}; {verdict_line(personal['gate'])}"
    if personal["gate"] is None:
        return f"the bundle's; personal ones of {learned}, passed an older gate: {LEARN_AGAIN}"
    return f"the bundle's; personal ones of {learned} belong to the bundle {personal['bundle_sha256'][:12]}"
