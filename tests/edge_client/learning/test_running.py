"""A round of learning on the device: its result, its stops, its refusals, and what a kill at any moment leaves."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from edgefl_client.commands.learning_text import learned_text
from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import Point, load_standing, only_one, save_standing
from edgefl_client.learning.errors import LearningError, Paused
from edgefl_client.learning.limits import Battery, LearningLimits
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.round_alone import POINT, STANDING, run_train
from edgefl_client.learning.round_learner import PointFile
from edgefl_client.scoring.personal import load_personal
from edgefl_client.scoring.scorer import Scorer
from edgefl_client.trust.models import install
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.errors import StorageError
from edgefl_protocol.payload import digest

ONE = {"threads": 1}
LONG = {"threads": 1, "epochs": 60}


def kept_point(home):
    """The point inside a round, as it lies in its file."""
    return Point.from_payload(PointFile(home.learning / POINT).load())


def keep_point(home, point):
    PointFile(home.learning / POINT).save(point.to_payload())


def standing(home, bundle):
    found = load_standing(home.learning / STANDING)
    return found if found is not None and found.bundle_sha256 == bundle.sha256 else None


def test_a_round_learns_and_is_scored_with(bundle, labels, home, lab):
    """docs/design.md 7: what passed its gate on at least 20 held-back pictures a class is what a score then uses."""
    seen = []
    found = run_train(home, bundle, labels, TrainOptions(**LONG, report=lambda facts: seen.append(dict(facts))))
    assert (found["state"], found["held_back"], found["learned_from"]) == ("done", 40, 14)
    assert found["gate"]["passed"] and found["gate"]["personal_balanced_accuracy"] > 0.9
    losses = [facts["loss"] for facts in seen if "summary" in facts]
    assert len(losses) == 60 and losses[-1] < losses[0]
    personal = load_personal(home, bundle)
    assert personal is not None and digest(personal.weights) == found["weights_sha256"]
    assert personal.seen == (True, True, False)
    assert personal.light is None  # 14 pictures are too few to know their usual light
    score = Scorer(bundle, personal=personal).score(lab.photo(colour=(90, 60, 50)))
    assert score.predicted == "MEL"
    assert score.to_json()["model"]["state"] == {"kind": "personal", "sha256": found["weights_sha256"]}
    assert Scorer(bundle).score(lab.photo()).to_json()["model"]["state"]["kind"] == "bundle"


def test_what_is_worse_is_never_used(school, labels, home):
    """docs/design.md 7, gate: personal values that judge worse than the bundle's are kept from use."""
    good = np.array([[-20, -20, -20], [20, 20, 20], [0, 0, 0]], np.float32)
    bias = np.array([25, -21, -9], np.float32)
    bundle = school.learning_bundle(
        weights={"head__weight": good, "head__bias": bias}, rates=dict.fromkeys(("head.weight", "head.bias"), 0.0)
    )
    run_train(home, bundle, labels, TrainOptions(**ONE, limits=LearningLimits(minutes=1e-9)))
    point = kept_point(home)
    keep_point(home, replace(point, state={**point.state, "head.weight": -good, "head.bias": -bias}))
    found = run_train(home, bundle, labels, TrainOptions(**ONE))
    assert found["gate"]["bundle_balanced_accuracy"] > 0.9 > found["gate"]["personal_balanced_accuracy"]
    assert not found["gate"]["passed"] and load_personal(home, bundle) is None
    assert run_train(home, bundle, labels, TrainOptions(**ONE, restart=True))["gate"]["passed"]  # as good is enough


def test_a_failed_round_leaves_the_one_before_in_use(school, labels, home):
    """What is reported as in use is what `edgefl score` would use; classes that it never names are told."""
    good = np.array([[-20, -20, -20], [20, 20, 20], [0, 0, 0]], np.float32)
    weights = {"head__weight": good, "head__bias": np.array([25, -21, -9], np.float32)}
    bundle = school.learning_bundle(weights=weights, rates=dict.fromkeys(("head.weight", "head.bias"), 0.0))
    first = run_train(home, bundle, labels, TrainOptions(**ONE))
    assert first["gate"]["passed"]  # equal is enough
    used = first["in_use"]
    assert (used["kind"], used["round"], used["never_named"]) == ("personal", 1, ["BCC"])
    before = standing(home, bundle)
    turned = replace(before, state={**before.state, "head.weight": -good})
    save_standing(home.learning / STANDING, turned)
    later = run_train(home, bundle, labels, TrainOptions(**ONE))
    assert not later["gate"]["passed"] and later["round"] == 2
    assert learned_text(later, "", own=True).startswith("this device's own round 2 learned")  # no federation's round
    assert later["in_use"]["round"] == 1 == load_personal(home, bundle).round
    assert (
        "personal values of round 1 stay in use\nThe values learned on this device never predict BCC"
        in learned_text(later, "")
    )


def test_worse_values_never_replace_better_ones_in_use(school, labels, home):
    """device-learning.md, the learning gate: a round no worse than the bundle once replaced a better one in silence."""
    names, good = ("head.weight", "head.bias"), np.array([[-20, -20, -20], [20, 20, 20], [0, 0, 0]], np.float32)
    weights = {"head__weight": 0 * good, "head__bias": np.float32([25, -21, -21])}  # it calls all pictures melanomas
    bundle = school.learning_bundle(weights=weights, rates=dict.fromkeys(names, 0.0))
    run_train(home, bundle, labels, TrainOptions(**ONE))
    before = standing(home, bundle)
    right = replace(before, state={**before.state, "head.weight": good, "head.bias": np.float32([25, -21, -9])})
    save_standing(home.learning / STANDING, right)
    second = run_train(home, bundle, labels, TrainOptions(**ONE))
    assert second["gate"]["passed"] and second["gate"]["before"]["balanced_accuracy"] == second["gate"]["chance"] == 0.5
    kept = load_personal(home, bundle)
    assert kept.round == 2 and kept.verdict.to_json() == second["gate"]  # as status tells it

    save_standing(home.learning / STANDING, replace(before, round=2))
    third = run_train(home, bundle, labels, TrainOptions(**ONE))
    gate = third["gate"]
    assert gate["bundle_balanced_accuracy"] == gate["personal_balanced_accuracy"] == 0.5
    assert (gate["refused_for"], "balanced_accuracy" in gate["before"]["worse_in"]) == (["before"], True)
    assert third["in_use"]["round"] == 2 and digest(load_personal(home, bundle).weights) == digest(kept.weights)
    assert "the new values are not used; the personal values of round 2 stay in use" in learned_text(third, "")
    save_standing(home.learning / STANDING, replace(right, round=3))
    assert run_train(home, bundle, labels, TrainOptions(**ONE))["in_use"]["round"] == 4  # as good is enough


def test_the_next_round_goes_on_from_the_last(bundle, labels, home):
    """Private prompts and moments live on from round to round (docs/methods.md 1.6)."""
    run_train(home, bundle, labels, TrainOptions(**ONE))
    after = standing(home, bundle)
    found = run_train(home, bundle, labels, TrainOptions(**ONE))
    assert after is not None and after.round == 1 and found["round"] == 2
    assert int(standing(home, bundle).state["optimizer.step"]) == 2 * int(after.state["optimizer.step"])
    again = run_train(home, bundle, labels, TrainOptions(**ONE, restart=True))
    assert again["round"] == 1 and again["state_sha256"] == digest(dict(after.state))


def test_limits_stop_between_two_steps_and_the_result_is_the_same(bundle, labels, tmp_path):
    """Stopped after every single step by a battery that drains, the round ends with the bits of an uninterrupted
    one."""
    whole = run_train(Home(tmp_path / "a"), bundle, labels, TrainOptions(**ONE))
    home, stops = Home(tmp_path / "b"), 0
    while True:
        charge = iter([50])  # when it begins
        limits = LearningLimits(battery=lambda charge=charge: Battery(True, next(charge, 49)))
        found = run_train(home, bundle, labels, TrainOptions(**ONE, limits=limits))
        if found["state"] == "done":
            break
        assert "battery is at 49 %" in found["reason"]
        stops += 1
    assert stops == 8  # 2 epochs of 14 pictures in batches of 4
    assert found["state_sha256"] == whole["state_sha256"]
    assert found["weights_sha256"] == whole["weights_sha256"]


def test_an_empty_battery_reads_no_picture(bundle, labels, home, tmp_path):
    """A timer asks again and again: on a low battery nothing is decoded, and what stands is left as it is."""
    limits = LearningLimits(battery=lambda: Battery(True, 49))
    told = []
    with pytest.raises(Paused, match="battery is at 49 %"):
        run_train(home, bundle, labels, TrainOptions(**ONE, limits=limits, report=told.append))
    assert told == [] and not (home.learning / "table.json").exists()


# A file takes two: itself, its folder.
@pytest.mark.parametrize("each", [pytest.param(4, marks=pytest.mark.smaller), pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_at_any_write_loses_nothing(bundle, labels, tmp_path, monkeypatch, each):
    """docs/security.md check 59, on the device: one sentence, and with space again the round ends with the same bits,
    whichever file found the disk full (every second one, or each); no half file stays."""
    options = TrainOptions(**ONE, epochs=1, checkpoint_seconds=0)
    whole, real, left = run_train(Home(tmp_path / "whole"), bundle, labels, options), os.fsync, [0]

    def flush(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    for writes in range(0, 100, each):
        home, left[0] = Home(tmp_path / str(writes)), writes
        with monkeypatch.context() as patch:
            patch.setattr("edgefl_protocol.durable.os.fsync", flush)
            try:
                run_train(home, bundle, labels, options)
                break
            except StorageError as error:
                assert "disk is full" in str(error)
        assert not list(home.root.rglob("*.tmp"))
        found = run_train(home, bundle, labels, options)
        assert (found["round"], found["weights_sha256"]) == (1, whole["weights_sha256"])
        assert found["state_sha256"] == whole["state_sha256"]
    assert writes >= 16  # who is held back, the table, four steps, the end of learning, what passed, the round


def test_the_minutes_count_from_the_reading_of_the_pictures(bundle, labels, home):
    """`--minutes` bounds the whole command: a clock that jumps while pictures are read leaves one step, no more."""
    now = [0.0]

    def report(facts):
        if "reading" in facts:
            now[0] += 2.0  # 54 pictures: 108 s

    limits = LearningLimits(minutes=1.5, clock=lambda: now[0])
    found = run_train(home, bundle, labels, TrainOptions(**ONE, limits=limits, report=report))
    assert (found["state"], found["step"], found["reason"]) == ("paused", 1, "the limit of 1.5 minutes is reached")


def test_other_pictures_begin_the_round_anew(bundle, labels, home, school, tmp_path):
    """docs/reference/device-learning.md: where the pictures change in the middle, nothing of those before is left."""
    run_train(home, bundle, labels, TrainOptions(**ONE, limits=LearningLimits(minutes=1e-9)))
    before = kept_point(home)
    notes = []
    other = school.table(tmp_path / "more", each=30)
    stop = TrainOptions(
        **ONE, limits=LearningLimits(minutes=1e-9), report=lambda facts: notes.append(facts.get("warning"))
    )
    assert run_train(home, bundle, other, stop)["round"] == 1
    assert any(note and "the round begins anew" in note for note in notes)
    after = kept_point(home)
    assert (before.epoch, before.step) == (after.epoch, after.step) == (0, 1)
    assert int(after.state["optimizer.step"]) == 1  # the one before is forgotten
    assert run_train(home, bundle, other, TrainOptions(**ONE))["state"] == "done"


def test_another_bundle_takes_nothing_over(bundle, labels, home, school, lab):
    """Personal values belong to the bundle they were learned with, by its SHA-256."""
    run_train(home, bundle, labels, TrainOptions(**LONG))
    data = school.learning_bytes(seed=4)
    other = load_bundle(data, [lab.SIGNER.public], lab.NOW_MS)
    install(home, data, other)
    assert load_personal(home, other) is None and standing(home, other) is None
    assert run_train(home, other, labels, TrainOptions(**ONE))["round"] == 1


def test_one_process_at_a_time(bundle, labels, home):
    """Two rounds at once would overwrite each other's checkpoint."""
    with only_one(home), pytest.raises(LearningError) as caught:
        run_train(home, bundle, labels, TrainOptions(**ONE))
    assert caught.value.code == "busy"


def test_what_a_kill_left_half_written_is_removed(home):
    """docs/security.md 5, kill -9 anywhere: a point of a ResNet-18 is 180 MB, and a device is killed often. Records
    that another process writes without this lock are left alone."""
    folder = home.prepare(home.learning)
    ours, theirs = folder / ".live-round.payload.0f.tmp", folder / ".live-over.json.0f.tmp"
    for path in (ours, theirs, folder / "personal.payload"):
        path.write_bytes(b"half")
    with only_one(home):
        assert not ours.exists() and theirs.exists() and (folder / "personal.payload").exists()


def test_values_that_are_not_finite_never_replace_the_state(school, labels, home):
    """A loss that runs away ends the round with one sentence; the checkpoint before stays."""
    bundle = school.learning_bundle(rates={"head.weight": 1.0, "head.bias": 1.0})
    run_train(home, bundle, labels, TrainOptions(**ONE, limits=LearningLimits(minutes=1e-9)))
    point = kept_point(home)
    wild = {**point.state, "head.weight": np.full((3, 3), 3e38, np.float32)}
    keep_point(home, replace(point, state=wild))
    with pytest.raises(LearningError) as caught:
        run_train(home, bundle, labels, TrainOptions(**ONE))
    assert caught.value.code == "not_finite"
    assert kept_point(home).step == point.step and standing(home, bundle) is None


def test_pictures_that_take_too_much_are_not_even_read(bundle, home, school, tmp_path):
    """24 x 24 pixels are 1.7 kB: 700 pictures, twice while they are dealt, are 2.3 MiB; no file is opened."""
    table = tmp_path / "many.csv"
    table.write_text("image,label\n" + "\n".join(f"{number}.png,NV" for number in range(700)) + "\n")
    with pytest.raises(LearningError, match=r"700 pictures would take 2 MiB") as caught:
        run_train(home, bundle, table, TrainOptions(**ONE, limits=LearningLimits(memory_mib=2)))
    assert caught.value.code == "memory"


def test_memory_is_asked_for_before_the_work(school, labels, home):
    """Two steps, 100 MiB at one picture and 140 at five, make 210 at twelve; 150 are enough for six."""
    bundle = school.learning_bundle(batch=12)
    tries = {"memory_mib": 150, "memory": iter([90.0, 100.0, 140.0]).__next__}
    with pytest.raises(LearningError, match=r"12 pictures needs about 210 MiB .* use --batch 6") as caught:
        run_train(home, bundle, labels, TrainOptions(**ONE, limits=LearningLimits(**tries)))
    assert caught.value.code == "memory" and not (home.learning / POINT).exists()
    enough = LearningLimits(memory_mib=210, memory=iter([90.0, 100.0, 140.0, *[200.0] * 50]).__next__)
    assert run_train(home, bundle, labels, TrainOptions(**ONE, limits=enough))["state"] == "done"
    over = LearningLimits(memory_mib=210, memory=iter([90.0, 100.0, 140.0, *[211.0] * 50]).__next__)
    found = run_train(home, bundle, labels, TrainOptions(**ONE, limits=over))
    assert found["state"] == "paused" and "smaller --batch" in found["reason"]


def test_a_bundle_that_only_scores_is_named(plain_bundle, labels, home):
    """One sentence that says whom to ask."""
    with pytest.raises(LearningError, match="--with-training"):
        run_train(home, plain_bundle, labels, TrainOptions(**ONE))


READERS = {
    "alone.payload": standing,
    "alone-round.payload": lambda home, bundle: kept_point(home),
    "personal.payload": load_personal,
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused(bundle, labels, home, name):
    """A file that is cut short is never read as values."""
    run_train(home, bundle, labels, TrainOptions(**LONG))
    file = home.learning / name
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(StorageError):
        READERS[name](home, bundle)


@pytest.mark.parametrize("name", READERS)
def test_a_bit_that_falls_over_never_becomes_a_weight(bundle, labels, home, name):
    """A weight that changed on the disk would be another score, shown with the same confidence."""
    run_train(home, bundle, labels, TrainOptions(**LONG))
    file = home.learning / name
    assert file.stat().st_mode & 0o777 == 0o600
    whole = file.read_bytes()
    for at in (len(whole) // 2, len(whole) - 40, len(whole) - 1):
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(bytes(changed))
        with pytest.raises(StorageError, match="damaged"):
            READERS[name](home, bundle)


@pytest.mark.slow
def test_kill_at_any_moment_ends_with_the_same_bits(school, labels, tmp_path, lab):
    """docs/security.md check 57, on the device: kill −9 at random moments; the last start ends with the same values."""
    file = tmp_path / "model.edgefl"
    file.write_bytes(school.learning_bytes())
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from edgefl_client.home import Home\n"
        "from edgefl_client.learning.options import TrainOptions\n"
        "from edgefl_client.learning.round_alone import run_train\n"
        "from edgefl_protocol.bundle import load_bundle\n"
        f"signer = bytes.fromhex({lab.SIGNER.public.hex()!r})\n"
        f"bundle = load_bundle(Path({str(file)!r}).read_bytes(), [signer], {lab.NOW_MS})\n"
        "options = TrainOptions(threads=1, epochs=600, checkpoint_seconds=0)\n"
        f"print(run_train(Home(Path(sys.argv[1])), bundle, Path({str(labels)!r}), options)['state_sha256'])\n"
    )

    def start(home: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-c", script, str(tmp_path / home)]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)

    expected = start("whole").communicate(timeout=60)[0].strip()
    checkpoint = tmp_path / "killed" / "learning" / POINT
    rng, kills, found = np.random.default_rng(0), 0, ""
    while not found:
        process = start("killed")
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(float(rng.uniform(0, 0.1)))
        if process.poll() is None and kills < 3:
            process.send_signal(signal.SIGKILL)
            kills += 1
        found = process.communicate(timeout=60)[0].strip()  # of who was not killed, or too late
    assert kills == 3, "the training ended before it could be killed"
    assert len(expected) == 64
    assert found == expected
