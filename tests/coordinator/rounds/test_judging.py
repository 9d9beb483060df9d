"""Replies of another form than they should have: docs/security.md check 46, at the rule and through the rounds."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sqlalchemy import func, select
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.rounds.judging import beside_the_average, judge
from edgefl_coordinator.rounds.protection.bounding import Protection
from edgefl_coordinator.rounds.stored_rounds import try_again
from edgefl_coordinator.settings import ProtectionSettings
from edgefl_coordinator.store.tables import audit, replies
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.messages.requests import Refusal
from edgefl_protocol.payload import digest

SHA = {"site_sha256": "0" * 64}
WEIGHT, BIAS = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)


def weights(arrays: dict[str, Any] | None = None, **scalars: Any) -> Payload:
    """A reply of averaged tensors; None removes an array, a value replaces or adds one."""
    merged = {"head.weight": WEIGHT, "head.bias": BIAS, **(arrays or {})}
    kept = {name: np.asarray(array) for name, array in merged.items() if array is not None}
    return Payload(kept, {**SHA, "n_train": 10, **scalars})


def mean(chosen: Any) -> dict[str, np.ndarray]:
    """FedAvg in numpy: what the arrays' own broadcasting would average without a word."""
    names = sorted(chosen)
    return {key: sum(chosen[name].arrays[key] for name in names) / len(names) for key in ("head.weight", "head.bias")}


def judged(offered: dict[str, Payload], broadcast: Payload | None = None, **rules: Any) -> Any:
    sent = broadcast or Payload(weights().arrays, {"phase": "train"})
    return judge(offered, dict.fromkeys(offered, sent), mean, **{"quorum": 2, **rules})


# fmt: off
ODD = {
    "a shape that numpy would spread":  (weights({"head.bias": np.ones(1, np.float32)}), "head.bias"),
    "a scalar array":                   (weights({"head.bias": np.float32(1)}), "head.bias"),
    "transposed":                       (weights({"head.weight": WEIGHT.T.copy()}), "head.weight"),
    "another type":                     (weights({"head.weight": WEIGHT.astype(np.float64)}), "head.weight"),
    "integers":                         (weights({"head.weight": WEIGHT.astype(np.int64)}), "head.weight"),
    "a tensor missing":                 (weights({"head.bias": None}), "head.bias"),
    "a tensor more":                    (weights({"head.more": BIAS}), "head.more"),
    "a name misspelt":                  (weights({"head.bias": None, "head.bais": BIAS}), "head.b"),
    "a number as text":                 (weights(n_train="10"), "n_train"),
    "a scalar more":                    (weights(patient=7), "patient"),
}
# fmt: on


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_one_odd_reply_is_refused_and_the_others_are_averaged(name, first, told) -> None:
    """Check 46: wrong shape, type or names from one of three, whether the broadcast tells the form or only the others
    do: it is named with what differs, and the result is the others' mean."""
    odd, word = ODD[name]
    offered = {("a" if first else "z"): odd, "clinic-b": weights(), "clinic-c": weights({"head.bias": 3 * BIAS})}
    verdict = judged(offered, None if told else Payload())
    assert set(verdict.refused) == {"a" if first else "z"}
    assert word in next(iter(verdict.refused.values())) and not verdict.problem
    np.testing.assert_array_equal(verdict.result["head.bias"], 2 * BIAS)
    np.testing.assert_array_equal(verdict.result["head.weight"], WEIGHT)


def test_the_broadcast_outvotes_two_colluders() -> None:
    """Check 46: two of three agree on a shape that the round's broadcast does not have."""
    wrong = weights({"head.weight": np.ones((3, 3), np.float32)})
    verdict = judged({"a": wrong, "b": wrong, "c": weights()}, quorum=1)
    assert set(verdict.refused) == {"a", "b"} and verdict.result is not None
    assert judged({"a": wrong, "b": wrong, "c": weights()}).problem == "too few sound replies: 1, at least 2 are needed"


def test_without_a_majority_nobody_is_blamed() -> None:
    """Check 46: of two forms, none is that of more than half: nothing is averaged and nobody is refused."""
    verdict = judged({"a": weights(), "b": weights({"head.bias": np.ones(1, np.float32)})}, Payload())
    assert verdict.result is None and not verdict.refused and "more than half" in verdict.problem


PROTOTYPE, MAPS = np.ones(4, np.float32), np.ones((2, 9), np.float16)


def by_class(**arrays: np.ndarray) -> Payload:
    """A reply of what a site has for some classes: `prototypes_0` becomes `prototypes.0`."""
    counts = {f"n.{name.split('_')[1]}": 3 for name in arrays if name.startswith("proto")}
    return Payload({name.replace("_", "."): array for name, array in arrays.items()}, {**SHA, **counts})


def test_sites_need_not_hold_the_same_classes() -> None:
    """docs/methods.md: a site sends prototypes or maps of the classes it has, as many maps as it has."""
    offered = {
        "a": by_class(prototypes_0=PROTOTYPE, maps_0=MAPS),
        "b": by_class(prototypes_2=PROTOTYPE, prototypes_3=PROTOTYPE, maps_3=MAPS[:1]),
        "c": by_class(prototypes_0=PROTOTYPE),
    }
    verdict = judge(offered, dict.fromkeys(offered, Payload()), len, quorum=3)
    assert verdict.result == 3 and not verdict.refused


@pytest.mark.parametrize(
    "odd",
    [
        by_class(prototypes_1=PROTOTYPE[:1]),
        by_class(prototypes_0=PROTOTYPE, prototypes_1=np.ones(1, np.float32)),
        by_class(prototypes_1=PROTOTYPE.astype(np.float64)),
        by_class(prototypes_1=PROTOTYPE, maps_1=np.ones((2, 16), np.float16)),
    ],
)
def test_what_is_there_by_class_has_one_form_too(odd) -> None:
    """Check 46: another width or type of one class's array, compared with those of other classes at other sites."""
    good = by_class(prototypes_0=PROTOTYPE, maps_0=MAPS)
    offered = {"a": good, "b": by_class(prototypes_2=PROTOTYPE, maps_2=MAPS[:1]), "c": odd}
    verdict = judge(offered, dict.fromkeys(offered, Payload()), len, quorum=2)
    assert set(verdict.refused) == {"c"} and ".<k> is " in verdict.refused["c"] and verdict.result == 2


def test_a_site_with_few_images_has_few_features() -> None:
    """docs/methods.md, FedCLF: a bank holds fewer than K features where a site has fewer images; all have one width."""
    banks = {name: np.full((rows, 4), 0.5, np.float16) for name, rows in (("a", 3), ("b", 8), ("c", 5))}
    offered = {name: weights({"features": bank}) for name, bank in banks.items()}
    verdict = judged(offered)
    assert not verdict.refused and not verdict.problem
    wide = judged({**offered, "c": weights({"features": np.full((5, 6), 0.5, np.float16)})})
    assert list(wide.refused) == ["c"] and "features" in wide.refused["c"]


BANK = np.full((3, 4), 0.5, np.float16)


def test_features_alone_are_a_contribution_beside_the_average() -> None:
    """docs/decisions/0033: some send features alone, whether they are many or few; nobody is refused for the other's
    form, contributions count for no quorum, and where a method shares no features such a reply is odd."""
    alone = Payload({"features": BANK}, {**SHA, "n_train": 0})
    whole = weights({"features": BANK})
    beside = beside_the_average(("features", "weights"), "train")
    for many, few in ((alone, whole), (whole, alone)):
        offered = {"a": many, "b": few, "c": many}
        verdict = judge(offered, dict.fromkeys(offered, Payload()), sorted, quorum=1, beside=beside)
        assert verdict.result == ["a", "b", "c"] and not verdict.refused
    offered = {"a": alone, "b": whole, "c": alone}
    assert judge(offered, dict.fromkeys(offered, Payload()), sorted, quorum=2, beside=beside).problem == (
        "too few sound replies: 1, at least 2 are needed"
    )
    assert beside_the_average(("weights",), "train") == beside_the_average(("features",), "warm") == frozenset()
    odd = judge({"a": whole, "b": alone, "c": whole}, dict.fromkeys("abc", Payload()), sorted, quorum=2)
    assert set(odd.refused) == {"b"}
    said = Payload({"features": BANK}, {**SHA, "n_train": 0, "patient": 7})
    offered = {"a": alone, "b": said, "c": alone, "d": whole}
    verdict = judge(offered, dict.fromkeys(offered, Payload()), sorted, quorum=1, beside=beside)
    assert set(verdict.refused) == {"b"} and "patient" in verdict.refused["b"]


def test_what_the_method_cannot_use_is_refused_alone() -> None:
    """Check 46: a field that only the method reads is found by aggregating each reply alone."""

    def take(chosen: Any) -> int:
        return sum(
            int(reply.scalars["n." + name.rpartition(".")[2]]) for reply in chosen.values() for name in reply.arrays
        )

    bare = Payload({"prototypes.1": PROTOTYPE}, SHA)
    offered = {"a": by_class(prototypes_0=PROTOTYPE), "b": bare, "c": by_class(prototypes_2=PROTOTYPE)}
    verdict = judge(offered, dict.fromkeys(offered, Payload()), take, quorum=2)
    assert verdict.result == 6 and set(verdict.refused) == {"b"} and "KeyError" in verdict.refused["b"]


def test_a_reply_without_arrays_is_the_methods_affair() -> None:
    """docs/methods.md, FedMAE: a site that learned no token replies with none; FedAvg cannot use such a reply."""
    empty = Payload({}, {**SHA, "n_train": 0})
    assert set(judged({"a": empty, "b": weights(), "c": weights()}).refused) == {"a"}
    counted = judge({"a": empty, "b": weights()}, {"a": Payload(), "b": Payload()}, len, quorum=1)
    assert counted.result == 2 and not counted.refused


def test_the_order_of_replies_changes_no_verdict() -> None:
    """Check 48: every order of four replies, one of them odd."""
    offered = {"a": weights(), "b": weights(), "c": ODD["transposed"][0], "d": weights()}
    verdicts = [judged(dict(order)) for order in itertools.permutations(offered.items())]
    assert all(one.refused == verdicts[0].refused and list(one.refused) == ["c"] for one in verdicts)


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed-mean", "mixed-mean", "multi-krum", "mean"])
def test_a_hundred_orders_give_the_same_bytes(rule) -> None:
    """Check 48: ten replies of unlike counts, two of them far off and one odd, in 100 drawn orders: one SHA-256, and
    with claims alone bounded the weighted mean of numpy to 1e-6."""
    averaging = pytest.importorskip("edgefl_trainer.learning.averaging")
    draw = np.random.default_rng(48)
    arrays = [{"head.weight": draw.normal(0, 1 + 2 * (one < 2), (2, 3)).astype(np.float32)} for one in range(10)]
    offered = {f"clinic-{one}": weights(found, n_train=20 + one) for one, found in enumerate(arrays)}
    offered["clinic-odd"] = ODD["transposed"][0]
    sent = weights()

    def take(chosen: Any) -> dict[str, np.ndarray]:
        return dict(averaging.weighted_mean(chosen, averaging.sample_weights(chosen)))

    digests, found = set[str](), dict[str, np.ndarray]()
    for _ in range(100):
        order = [list(offered)[place] for place in draw.permutation(len(offered))]
        protection = Protection(ProtectionSettings(rule=rule))
        replies = {name: offered[name] for name in order}
        verdict = judge(replies, dict.fromkeys(order, sent), take, quorum=2, protection=protection)
        assert "clinic-odd" in verdict.refused
        found = verdict.result
        digests.add(digest(found))
    assert len(digests) == 1
    if rule == "mean":
        kept = np.stack([one["head.weight"] for one in arrays]).astype(np.float64)
        wanted = np.average(kept, axis=0, weights=np.arange(20, 30))
        np.testing.assert_allclose(found["head.weight"], wanted, rtol=1e-6, atol=1e-6)


def averaging_worker(folder: Path, timeout_s: float) -> None:
    """FedAvg's server without a trainer: the state is the mean, the broadcast is the state."""
    job = read_job(folder)
    phases = ("train", "train", "train")
    if job.kind == "start":
        made = Payload(weights().arrays)
        write_result(folder, JobResult(made.to_bytes(), phases, dict.fromkeys(job.sites, made.to_bytes())))
        return
    state = Payload.from_bytes(read_bounded(job.state, 2**20))
    if job.kind == "broadcast":
        write_result(folder, JobResult(b"", phases, dict.fromkeys(job.sites, state.to_bytes())))
        return
    offered = {name: Payload.from_bytes(read_bounded(path, 2**20)) for name, path in job.replies.items()}
    verdict = judge(offered, dict.fromkeys(offered, state), mean, quorum=job.quorum)
    data = Payload(verdict.result).to_bytes() if verdict.result else b""
    sent = dict.fromkeys(job.sites, data) if data else {}
    write_result(folder, JobResult(data, phases, sent, verdict.refused, verdict.problem))


BAD = weights({"head.bias": np.ones(1, np.float32)})


@pytest.fixture
def federation(make_coordinator, tools) -> Any:
    """Three members of a method that averages tensors; a round needs two replies and closes at three."""
    coordinator = make_coordinator(task={"shares_maps": False}, rounds={"quorum_target": 3, "count": 3})
    trio = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, averaging_worker)
    return coordinator, trio


def rows(coordinator: Any) -> int:
    with coordinator.store.transaction() as connection:
        return connection.scalar(select(func.count()).select_from(replies))


def test_one_bad_site_blocks_no_round(federation) -> None:
    """Check 46: the round completes without the odd reply; audit log and status name the offender and the reason."""
    coordinator, trio = federation
    for number in (1, 2, 3):
        for member in trio:
            good = weights({"head.bias": number * BIAS})
            assert isinstance(member.reply(number, payload=BAD if member is trio[2] else good), Payload)
        assert step(coordinator, averaging_worker)
    facts = OPERATIONS["status"](coordinator, {})
    assert facts["state"] == "done" and facts["problem"] is None and facts["failing"] is None
    assert [(one["round"], one["name"]) for one in facts["refused"]] == [(2, "clinic-c"), (3, "clinic-c")]
    assert "head.bias is float32 with shape (1,)" in facts["refused"][0]["reason"]
    with coordinator.store.transaction() as connection:
        told = list(connection.scalars(select(audit.c.detail).where(audit.c.event == "reply_refused")))
        others = connection.execute(select(audit.c.event).where(audit.c.event == "job_failed")).all()
    assert len(blob_names(coordinator.store)) == 1 + 3  # the last state and the final broadcasts
    assert len(told) == 3 and "shape (1,)" in json.loads(told[0])["reason"] and not others
    assert rows(coordinator) == 6


def test_too_few_sound_replies_open_the_round_again(federation, clock) -> None:
    """Check 46 and 64: below the quorum the round takes replies again, keeps the sound one, and tries none twice."""
    coordinator, (one, two, bad) = federation
    one.reply(1, payload=weights())
    bad.reply(1, payload=BAD)
    clock.now_ms += 60_000
    assert step(coordinator, averaging_worker)
    facts = OPERATIONS["status"](coordinator, {})
    assert (facts["state"], facts["replies"], facts["deadline_ms"]) == ("open", 1, clock.now_ms + 60_000)
    assert facts["problem"] == "too few sound replies: 1, at least 2 are needed"
    again = bad.reply(1, payload=BAD, idem="another-work-item")
    assert isinstance(again, Refusal) and again.code == "bad_contribution" and "shape (1,)" in again.message
    for _ in range(3):  # deadlines pass, nothing is tried
        clock.now_ms += 60_000
        assert not step(coordinator, averaging_worker)
    two.reply(1, payload=weights())
    clock.now_ms += 60_000
    assert step(coordinator, averaging_worker)
    assert OPERATIONS["status"](coordinator, {})["round"] == 2


def test_a_tie_waits_for_one_more(federation, clock) -> None:
    """Check 46: the third reply decides which of two forms is right; until then the two are not tried again."""
    coordinator, (one, two, bad) = federation
    odd = weights({"head.more": BIAS})  # nothing in the broadcast tells against it
    one.reply(1, payload=weights())
    bad.reply(1, payload=odd)
    clock.now_ms += 60_000
    assert step(coordinator, averaging_worker)
    assert "more than half" in OPERATIONS["status"](coordinator, {})["problem"]
    clock.now_ms += 60_000
    assert not step(coordinator, averaging_worker)
    two.reply(1, payload=weights())
    assert step(coordinator, averaging_worker)
    facts = OPERATIONS["status"](coordinator, {})
    assert facts["round"] == 2 and [found["name"] for found in facts["refused"]] == ["clinic-c"]


def test_a_new_start_tries_once_more(federation, clock) -> None:
    """Reliability: after an upgrade the replies that could not be aggregated are tried again; a revocation does so."""
    coordinator, (one, two, bad) = federation
    one.reply(1, payload=weights())
    bad.reply(1, payload=weights({"head.more": BIAS}))
    clock.now_ms += 60_000
    assert step(coordinator, averaging_worker)
    with coordinator.store.transaction() as connection:
        try_again(connection)
    clock.now_ms += 60_000
    assert step(coordinator, averaging_worker)  # in vain, but it was tried
    OPERATIONS["revoke"](coordinator, {"name": "clinic-c"})
    two.reply(1, payload=weights())
    clock.now_ms += 60_000
    assert step(coordinator, averaging_worker)
    assert OPERATIONS["status"](coordinator, {})["round"] == 2


def test_what_the_machine_fails_is_shown_until_it_is_done(federation) -> None:
    """docs/security.md, reliability: a job that runs out of memory is nobody's fault: replies stay, status says so."""
    coordinator, trio = federation
    for member in trio:
        member.reply(1, payload=weights())

    def broken(folder: Path, timeout_s: float) -> None:
        raise OperatorError("the aggregation worker failed (-9): no message")

    with pytest.raises(OperatorError):
        step(coordinator, broken)
    failing = OPERATIONS["status"](coordinator, {})["failing"]
    assert (failing["kind"], failing["round"]) == ("aggregate", 1) and "-9" in failing["error"]
    assert step(coordinator, averaging_worker)
    assert OPERATIONS["status"](coordinator, {})["failing"] is None


def test_the_operator_reads_it(federation, clock) -> None:
    """docs/design.md, section 5: `status` says in a line each whose reply was refused and why a round opened again."""
    coordinator, (one, _, bad) = federation
    one.reply(1, payload=weights())
    bad.reply(1, payload=BAD)
    clock.now_ms += 60_000
    assert step(coordinator, averaging_worker)
    coordinator.store.close()
    shown = CliRunner().invoke(main, ["status", "--home", str(coordinator.store.home.root)]).stdout
    assert "refused: reply of clinic-c in round 1: the array head.bias is float32 with shape (1,)" in shown
    assert "opened again: too few sound replies: 1, at least 2 are needed" in shown and "failing" not in shown


@pytest.mark.parametrize("claimed", [-1, 10**12, "10", 2.5])
def test_claimed_samples_are_bounded(federation, claimed) -> None:
    """Check 46: 10^12 claimed samples, or a number that is none, are refused before anything is stored; the audit log
    names who claimed, and holds nothing that was claimed.
    """
    coordinator, trio = federation
    refused = trio[0].reply(1, payload=weights(n_train=claimed))
    assert isinstance(refused, Refusal) and refused.code == "bad_contribution" and "n_train" in refused.message
    assert rows(coordinator) == 0
    with coordinator.store.transaction() as connection:
        told = connection.execute(select(audit.c.subject, audit.c.detail).where(audit.c.event == "refused")).all()
    assert told == [("clinic-a", '{"code":"bad_contribution","round":1,"route":"reply"}')]
    assert isinstance(trio[0].reply(1, payload=weights()), Payload)
