"""`edgefl train` and `edgefl score --weights` at the command line (docs/design.md, sections 5 and 7)."""

import json

import pytest
from click.testing import CliRunner
from PIL import Image
from tests.edge_client.page_keys import keys_of

from edgefl_client.cli import cli
from edgefl_client.commands.learning_text import learned_text
from edgefl_client.doctor.home_checks import check_personal
from edgefl_client.doctor.status import run_status, status_text
from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.round_alone import run_train
from edgefl_client.scoring.checked_file import read_checked, write_checked
from edgefl_client.scoring.drawing.score_picture import _lines
from edgefl_client.scoring.personal import PERSONAL, PersonalState, load_personal
from edgefl_client.scoring.scorer import Scorer
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.trust.models import install
from edgefl_protocol.bundle import Bundle, load_bundle
from edgefl_protocol.payload import Payload
from edgefl_protocol.pictures.class_info import known_among


@pytest.fixture
def call(school, lab, tmp_path, monkeypatch):
    """Runs a command in a fresh home with a bundle that learns."""
    monkeypatch.delenv("EDGEFL_HOME", raising=False)
    file = tmp_path / "model.edgefl"
    file.write_bytes(school.learning_bytes())

    def run(command, *arguments):
        model = ["--model", str(file), "--trust", lab.SIGNER.public.hex(), "--home", str(tmp_path / "home")]
        return CliRunner().invoke(cli, [command, *map(str, arguments), *model, "--threads", "1"])

    return run


def test_learn_then_score(call, labels):
    """`model.state` says which values were used; personal ones are the default once they passed their gate."""
    picture = labels.parent / "MEL0.png"
    before = json.loads(call("score", picture, "--json").stdout)
    assert before["model"]["state"]["kind"] == "bundle"
    refused = call("score", picture, "--weights", "personal")
    assert refused.exception.code == "no_personal" and "edgefl train" in str(refused.exception)
    result = call("train", "--labels", labels, "--epochs", 60, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["state"] == "done" and found["gate"]["passed"]
    assert "epoch 60: loss" in result.stderr
    scored = call("score", picture, "--json")
    assert "personal values learned on this device" in scored.stderr
    assert "The values learned on this device never predict BCC" in scored.stderr  # none of its pictures shows one
    after = json.loads(scored.stdout)
    assert after["model"]["state"] == {"kind": "personal", "sha256": found["weights_sha256"]}
    assert after["predicted"] == "MEL"
    assert ", with the values learned here; " in call("score", picture).stdout
    back = call("score", picture, "--weights", "bundle", "--json")
    assert json.loads(back.stdout)["evidence"] == before["evidence"] and "personal" not in back.stderr
    assert "learned here" not in call("score", picture, "--weights", "bundle").stdout


def test_minutes_pause_a_round(call, labels):
    """A limit ends the command with 0 and one sentence; the same command goes on."""
    paused = call("train", "--labels", labels, "--minutes", "0.0000001")
    assert paused.exit_code == 0 and "the same command goes on from there" in paused.stdout
    assert "\n40 pictures held back " in call("train", "--labels", labels).stdout
    for option, value in (("--minutes", "0"), ("--minutes", "nan"), ("--checkpoint-every", "nan")):
        assert call("train", "--labels", labels, option, value).exit_code == 2  # nan would never stop, never save


def test_every_key_of_the_page_is_told_also_where_nothing_began(call, labels, monkeypatch):
    """docs/reference/device-learning.md, keys of `train --json`: of a device without power they were two."""
    done, few = (json.loads(call("train", "--labels", labels, *more, "--json").stdout)
                 for more in ((), ("--minutes", "0.0000001")))  # fmt: skip
    monkeypatch.setattr(LearningLimits, "forbidding", lambda _limits: "the battery is at 10 %")
    none = call("train", "--labels", labels, "--json")
    facts = json.loads(none.stdout)
    assert facts.keys() == done.keys() == few.keys() == keys_of("train") and none.exit_code == 0
    told = {key: value for key, value in facts.items() if value is not None}
    assert told == {"state": "paused", "reason": "the battery is at 10 %"}


def test_memory_is_watched(call, labels):
    """A step that would take more memory than it may is refused before the work."""
    error = call("train", "--labels", labels, "--memory", 1).exception
    assert error.code == "memory" and "one picture does not fit either" in str(error)


def test_other_kinds_of_files_are_read_where_they_are_named(call, school, tmp_path):
    """`--formats` means the same for score, train and contribute; the content decides, never the name."""
    table = school.table(tmp_path / "tiff")
    with Image.open(table.parent / "MEL0.png") as picture:
        picture.save(table.parent / "MEL0.png", "TIFF")
    error = call("train", "--labels", table).exception
    assert error.code == "unsupported_format" and "MEL0.png" in str(error)
    assert call("train", "--labels", table, "--formats", "png,tiff", "--epochs", 1).exit_code == 0


def test_too_few_pictures_are_named(call, school, tmp_path):
    """docs/design.md 7: at least 20 a class to judge with; said before hours of work, not after."""
    few = school.table(tmp_path / "few", each=12)
    error = call("train", "--labels", few).exception
    assert error.code == "few_images" and "it needs 20 and 5" in str(error)
    one = school.table(tmp_path / "one", each=30, classes=("NV",))
    assert call("train", "--labels", one).exception.code == "few_images"


@pytest.mark.parametrize("lacks", ["all but one", "missed", "suspicious_judged"])
def test_values_that_passed_an_older_gate_are_told_of_and_not_used(lacks, labels, school, lab, home):
    """A home of an earlier version opens; its values wait for a round that is judged, and status and doctor say so."""
    data = school.learning_bytes()
    bundle = load_bundle(data, [lab.SIGNER.public], lab.NOW_MS)
    install(home, data, bundle)
    run_train(home, bundle, labels, TrainOptions(threads=1, epochs=60))
    file = home.learning / PERSONAL
    kept = read_checked(file)
    before = {  # what version 0.1 before decision 0042 wrote
        "bundle_sha256", "seen", "images", "round", "held", "least_of_a_class", "bundle_balanced_accuracy",
        "personal_balanced_accuracy", "bundle_unnoticed", "personal_unnoticed",
    }  # fmt: skip
    if lacks == "missed":  # what it wrote before the gate counted missed pictures
        before = {key for key in kept.scalars if not key.endswith("_missed")}
    if lacks == "suspicious_judged":  # before a suspicious picture had to judge
        before = {*kept.scalars} - {lacks}
    write_checked(file, Payload(kept.arrays, {key: kept.scalars[key] for key in before}))
    assert load_personal(home, bundle) is None
    report = run_status(Device(home=home), online=False)
    assert (report["personal"]["in_use"], report["personal"]["gate"]) == (False, None)
    assert (
        "weights: the bundle's; personal ones of round 1, learned from 14 pictures, passed an older gate: "
        "edgefl train or edgefl sync learns a round and judges it anew" in status_text(report)
    )
    (found,) = check_personal(home)
    assert found.state == "warn" and "passed an older gate" in found.found and found.advice is not None
    assert run_train(home, bundle, labels, TrainOptions(threads=1))["gate"]["passed"]
    assert load_personal(home, bundle).round == 2
    (found,) = check_personal(home)
    assert found.state == "ok" and "referred" in found.detail
    assert found.found == "the values learned here score, those of round 2; they passed their gate"


def test_status_tells_which_values_are_in_use(labels, school, lab, home):
    """docs/design.md 7: what was learned is used with its very bundle, and with no newer one."""
    device = Device(home=home)

    def weights() -> str:
        return next(line for line in status_text(run_status(device, online=False)).splitlines() if "weights" in line)

    def use(data: bytes) -> Bundle:
        bundle = load_bundle(data, [lab.SIGNER.public], lab.NOW_MS)
        install(home, data, bundle)
        return bundle

    first = use(school.learning_bytes())
    assert weights() == "weights: the bundle's"
    found = run_train(home, first, labels, TrainOptions(threads=1, epochs=60))
    assert weights().startswith("weights: personal, round 1, learned from 14 pictures; on 40 pictures held back")
    assert ", referred " in weights() and ", balanced accuracy of those not referred " in weights()
    report = run_status(device, online=False)["personal"]
    assert (report["in_use"], report["sha256"], report["gate"]) == (True, found["weights_sha256"], found["gate"])
    newer = use(school.learning_bytes({"version": 2}))
    assert load_personal(home, newer) is None
    assert weights() == (
        f"weights: the bundle's; personal ones of round 1, learned from 14 pictures belong to the bundle "
        f"{first.sha256[:12]}"
    )


def test_only_the_bundle_in_use_replaces_the_values_of_another(labels, school, lab, home):
    """docs/reference/device-learning.md: a round with `--model` ended the use of the values, and said nothing of it."""
    first, second, third = files = [school.learning_bytes({"line": line}) for line in ("first", "second", "third")]
    bundles = {data: load_bundle(data, [lab.SIGNER.public], lab.NOW_MS) for data in files}
    assert run_train(home, bundles[first], labels, TrainOptions(threads=1, epochs=60))["gate"]["passed"]
    before = {path.name: path.read_bytes() for path in home.learning.iterdir()}
    for in_use, learns in ((None, second), (first, second), (second, third)):  # `--model` alone; as before; moved on
        if in_use is not None:
            install(home, in_use, bundles[in_use])
        with pytest.raises(LearningError, match="edgefl use, or remove these values") as refused:
            run_train(home, bundles[learns], labels, TrainOptions(threads=1, epochs=60, restart=True))
        assert refused.value.code == "other_bundle"
        assert {path.name: path.read_bytes() for path in home.learning.iterdir()} == before
    notes = []
    options = TrainOptions(threads=1, epochs=60, report=lambda facts: notes.append(facts.get("warning")))
    for _ in range(2):  # told once: then the values are its own
        assert run_train(home, bundles[second], labels, options)["in_use"]["kind"] == "personal"
    said = f"the new personal values replace those learned with the bundle {bundles[first].sha256[:12]}"
    assert [note for note in notes if note] == [said]


def test_suspicious_classes_that_learned_values_never_predict_are_told_everywhere(
    labels, school, lab, tmp_path, monkeypatch
):
    """The table holds MEL and NV: a carcinoma is then called by another name, and the gate has no picture of one.

    docs/reference/scores.md: what speaks against the values in use goes with every result, by full name.
    """
    monkeypatch.delenv("EDGEFL_HOME", raising=False)
    home, key = Home(tmp_path / "home"), school.learning_bytes({"info": known_among(("MEL", "NV", "BCC"))})
    bundle = load_bundle(key, [lab.SIGNER.public], lab.NOW_MS)
    install(home, key, bundle)
    found = run_train(home, bundle, labels, TrainOptions(threads=1, epochs=60))
    sentence = (
        "The values learned on this device never predict Basal cell carcinoma (BCC, malignant), whatever a picture "
        "shows: no picture that they learned from showed one."
    )
    told = {"never_named": ["BCC"], "never_suspicious": ["BCC"], "never_predicts": sentence}
    assert found["gate"]["passed"] and {**found["in_use"], **told} == found["in_use"]
    assert sentence in learned_text(found, "")
    report = run_status(Device(home=home), online=False)
    assert {**report["personal"], **told} == report["personal"] and f"  {sentence}" in status_text(report)
    (checked,) = check_personal(home)
    assert checked.state == "warn" and "Basal cell carcinoma (BCC, malignant)" in checked.found
    assert "edgefl train" in checked.advice and "edgefl advanced personal remove" in checked.advice
    picture = labels.parent / "MEL0.png"
    arguments = [str(picture), "--trust", lab.SIGNER.public.hex(), "--home", str(home.root), "--threads", "1"]
    scored = CliRunner().invoke(cli, ["score", *arguments, "--json"])
    assert sentence in json.loads(scored.stdout)["model"]["warnings"] and sentence in scored.stderr
    own = CliRunner().invoke(cli, ["score", *arguments, "--json", "--weights", "bundle"])
    assert sentence not in json.loads(own.stdout)["model"]["warnings"] + [own.stderr]
    shown = CliRunner().invoke(cli, ["advanced", "personal", "show", "--home", str(home.root)])
    assert sentence in shown.stdout


def test_no_value_claims_to_know_what_only_the_others_do(make_bundle, lab):
    """A device may have pictures of a class that the bundle's site lacks: its values then do predict it."""
    info = known_among(("MEL", "NV", "BCC"))
    bundle = make_bundle(seen=(True, True, False), info=info)
    own = Scorer(bundle, threads=1)
    assert [one for one in own.model.warnings if one.startswith("This model never predicts Basal cell")]
    state = PersonalState(
        bundle_sha256=bundle.sha256, weights=bundle.weights, seen=(False, True, True), verdict=None, images=1, round=1
    )
    personal = Scorer(bundle, threads=1, personal=state)
    (said,) = [one for one in personal.model.warnings if "never predict" in one]
    assert "Melanoma (MEL, malignant)" in said and "Basal" not in said
    drawn = _lines(personal.score(lab.photo()))
    assert said in [line.text for line in drawn]
