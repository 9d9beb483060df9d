"""`edgefl-export` as a person uses it: keys, bundle, verification, exit codes (docs/design.md, section 5)."""

import contextlib
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.export.conftest import write_run

from edgefl_client.scoring.scorer import Scorer
from edgefl_export.bundles import assemble
from edgefl_export.bundles.bundle_text import model_facts
from edgefl_export.bundles.destination import check_alone
from edgefl_export.cli import main
from edgefl_export.errors import ExportError
from edgefl_export.graphs.score import ScoreGraph
from edgefl_export.key_store import open_key
from edgefl_export.parity import score_parity
from edgefl_protocol.bundle import BundleFields, Labels, build_bundle, load_bundle, unverified_manifest
from edgefl_protocol.bundle.shown_map import ShownMap
from edgefl_protocol.pictures.preprocess import prepare
from edgefl_trainer.engine.models import open_run, predict
from edgefl_trainer.models.backbone_names import BACKBONE_FILE
from edgefl_trainer.models.backbones import backbone_bytes, weights_of


def call(*arguments, **options):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)


def assert_refused(result, code, *words):
    """One sentence on stderr, nothing on stdout, no traceback, no word of success."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def test_keygen_writes_a_private_key_only_its_owner_reads(tmp_path):
    """docs/design.md, section 5: PKCS#8 in signing.key, mode 0600; unencrypted with one warning line."""
    result = call("keygen", tmp_path / "keys")
    assert result.exit_code == 0
    private, public = tmp_path / "keys" / "signing.key", tmp_path / "keys" / "signing.pub"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert private.read_text().startswith("-----BEGIN PRIVATE KEY-----")
    assert len(bytes.fromhex(public.read_text())) == 32
    assert result.stderr.count("\n") == 1 and "not encrypted" in result.stderr


def test_a_site_that_took_part_in_no_round_is_exported_only_where_that_is_said(tmp_path, predictor, monkeypatch):
    """docs/reference/runs.md: such a model has learned nothing from its site's pictures."""
    run = write_run(tmp_path / "late", predictor)
    summary = json.loads((run / "summary.json").read_text())
    summary["sites"]["north"]["took_part"] = {"rounds": 0, "of": 3}
    (run / "summary.json").write_text(json.dumps(summary))
    assert call("keygen", tmp_path / "keys").exit_code == 0
    words = ("bundle", run, "--site", "north", "--sign", tmp_path / "keys", "-o", tmp_path / "late.edgefl")
    assert_refused(call(*words), 1, "north took part in 0 of 3 rounds", "--took-no-part")

    def traced(*_):
        raise ExportError("on to the graph")

    monkeypatch.setattr("edgefl_export.bundles.shown_map.measured_map", traced)
    assert_refused(call(*words, "--took-no-part"), 1, "on to the graph")


@pytest.mark.parametrize(
    ("times", "told"),
    [((1_700_000_000, "--expires-days", 30), "warning: the bundle expired "), ((1_700_000_000,), ""),
     ((4_000_000_000,), " days ahead of this clock, so a device refuses it")],
)  # fmt: skip
def test_a_bundle_that_no_device_takes_today_is_told_of_first(built, run_folder, tmp_path, monkeypatch, times, told):
    """It may be made all the same, for SOURCE_DATE_EPOCH makes an old one anew: the same bytes."""

    def traced(*_):
        raise ExportError("on to the graph")

    monkeypatch.setattr("edgefl_export.bundles.shown_map.measured_map", traced)
    words = ("bundle", run_folder, "--site", "north", "--sign", built["keys"], "-o", tmp_path / "m.edgefl")
    result = call(*words, "--created", *times)
    assert_refused(result, 1, told, "on to the graph")
    assert ("a device refuses it" in result.stderr) is bool(told)


@pytest.mark.parametrize("way", ["file", "environment"])
def test_keygen_encrypts_under_a_passphrase_and_bundle_needs_it(tmp_path, run_folder, way):
    """docs/design.md, section 5: passphrase from a file or EDGEFL_KEY_PASSPHRASE, never asked for."""
    word = tmp_path / "word"
    word.write_text(" a long passphrase\n")
    word.chmod(0o600)
    given = {"env": {"EDGEFL_KEY_PASSPHRASE": " a long passphrase"}} if way == "environment" else {}
    arguments = ["--passphrase-file", word] if way == "file" else []
    result = call("keygen", tmp_path / "keys", *arguments, **given)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "BEGIN ENCRYPTED PRIVATE KEY" in (tmp_path / "keys" / "signing.key").read_text()
    assert open_key(tmp_path / "keys", b" a long passphrase").key_id == result.stdout.strip()
    bundle = ["bundle", run_folder, "--site", "north", "--sign", tmp_path / "keys", "-o", tmp_path / "m.edgefl"]
    assert_refused(call(*bundle), 3, "passphrase")
    assert_refused(call(*bundle, env={"EDGEFL_KEY_PASSPHRASE": "wrong"}), 3, "does not open")
    assert not (tmp_path / "m.edgefl").exists()


def test_a_passphrase_that_others_can_read_is_refused(tmp_path):
    """docs/security.md 2.6, keys at rest: no key is made under it."""
    word = tmp_path / "word"
    word.write_text("a long passphrase\n")
    word.chmod(0o644)
    assert_refused(call("keygen", tmp_path / "keys", "--passphrase-file", word), 1, "chmod 600")
    assert not (tmp_path / "keys").exists()


def test_keygen_never_overwrites(tmp_path):
    """A second keygen into the folder leaves the first key as it was."""
    call("keygen", tmp_path)
    before = (tmp_path / "signing.key").read_bytes()
    assert_refused(call("keygen", tmp_path), 1, "exists already")
    assert (tmp_path / "signing.key").read_bytes() == before


def test_key_that_others_can_read_is_refused(tmp_path, run_folder):
    """docs/security.md 2.6: a private key open to group or world is not used."""
    call("keygen", tmp_path / "keys")
    (tmp_path / "keys" / "signing.key").chmod(0o644)
    result = call("bundle", run_folder, "--site", "north", "--sign", tmp_path / "keys", "-o", tmp_path / "m.edgefl")
    assert_refused(result, 1, "chmod 600")


def test_bundle_loads_under_its_key_and_carries_the_runs_model(built, run_folder):
    """docs/design.md, section 7: what a device loads holds the run's tensors, labels, preparation and card."""
    data, trust = built["file"].read_bytes(), [bytes.fromhex(built["pub"].read_text())]
    loaded = load_bundle(data, trust, now_ms=2**41)
    run = open_run(run_folder)
    predictor = run.predictor("north")
    assert loaded.labels.classes == ("MEL", "NV", "BKL") and loaded.labels.seen == (True, True, False)
    assert loaded.preprocess == run.preprocess and loaded.preprocess.size == 36
    assert set(loaded.weights) == set(predictor.module.options.tensors)
    assert all((loaded.weights[name] == predictor.tensors[name]).all() for name in loaded.weights)
    assert (loaded.card.site, loaded.card.method, dict(loaded.card.sites)) == ("north", "fedevprompt", {"north": 84})
    assert loaded.card.metrics["site"]["balanced_accuracy_interval"] == [0.375, 0.625]
    assert loaded.card.refer_above == 0.8 and loaded.card.temperature == pytest.approx(1.3)
    assert str(run_folder).encode() not in data


def test_bundle_reports_the_worst_figure_of_every_gate(built):
    """Export gates: the JSON names each quantity with its worst difference and what is allowed."""
    facts = json.loads(built["out"].read_text())
    assert set(facts["parity"]) == {"probabilities", "evidence", "vacuity", "dissonance", "map"}
    assert all(0 <= figure["worst"] <= figure["allowed"] for figure in facts["parity"].values())


@pytest.mark.slow
def test_two_builds_are_byte_identical(built, run_folder, members, tmp_path):
    """docs/security.md check 32: traced and packed again in another process, where hash seeds differ, run, fields and
    key give the file of the command line; another version gives another."""
    again = tmp_path / "again.edgefl"
    words = ["bundle", run_folder, "--site", "north", "--sign", built["keys"], "--created", 1_790_000_000, "-o", again]
    command = [sys.executable, "-c", "from edgefl_export.cli import main; main()", *map(str, words)]
    subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert again.read_bytes() == built["file"].read_bytes()
    key, builds = open_key(built["keys"], None), []
    for version in (1, 2):
        fields = BundleFields(federation=None, line="main", task="all", version=version, created_ms=1_790_000_000_000)
        builds.append(build_bundle(members.files, fields, [key]))
    assert builds[1] != builds[0]


def test_device_scores_the_bundle_as_predict_does(built, run_folder):
    """docs/security.md check 32: a 4:3 photograph scores alike through the trainer and through the device."""
    photo = np.random.default_rng(1).integers(0, 256, (90, 120, 3), np.uint8)
    run = open_run(run_folder)
    expected = predict(run.predictor("north"), np.array(prepare(photo, run.preprocess))[None])
    loaded = load_bundle(built["file"].read_bytes(), [bytes.fromhex(built["pub"].read_text())], now_ms=2**41)
    score = Scorer(loaded, threads=1).score(photo)
    assert list(score.probabilities.values()) == pytest.approx(expected.probabilities[0].tolist(), abs=1e-4)
    assert score.vacuity == pytest.approx(float(expected.vacuity[0]), abs=1e-4)


def test_a_bundle_says_what_its_classes_mean_and_why_it_has_no_threshold(built, run_folder):
    """docs/reference/scores.md: HAM10000's labels are known; a run from before its tune scores were kept warns."""
    loaded = load_bundle(built["file"].read_bytes(), [bytes.fromhex(built["pub"].read_text())], now_ms=2**41)
    assert {name: info.malignancy for name, info in loaded.labels.info.items()} == {
        "MEL": "malignant", "NV": "benign", "BKL": "benign",
    }  # fmt: skip
    suspicion = json.loads(built["out"].read_text())["suspicion"]
    assert suspicion["threshold"] is None and suspicion["statement"].startswith("WARNING: no threshold was chosen")
    assert "kept no scores" in suspicion["statement"]
    assert loaded.card.suspicion.statement == suspicion["statement"]


@pytest.mark.parametrize(("low", "told"), [(0.2, "WARNING: This model was not found better than chance"), (0.6, "")])
def test_whoever_signs_is_told_what_speaks_against_the_model(run_folder, low, told):
    """What a device says beside each score, the signer reads first: an interval that reaches chance (1/3) is one."""
    model = assemble.site_model(open_run(run_folder), "north")
    site = {"balanced_accuracy": 0.7, "balanced_accuracy_interval": [low, 0.9], "classes_tested": 3, "n_test": 40,
            "auroc": 0.8, "auroc_interval": [low, 0.9], "accuracy": 0.7}  # fmt: skip
    card = replace(model.card, untrained=False, metrics={**model.card.metrics, "site": site})
    members = assemble.Members(
        {"labels.json": Labels(model.classes, model.predictor.seen, model.info).to_bytes()}, card, (), "1.23"
    )
    said = model_facts(model, members, ShownMap(why="few_pictures", kind=None), [])["quality"]
    if told:
        assert said[0].startswith(told) and all(line.startswith("WARNING: ") for line in said)
    else:
        assert len(said) == 1 and said[0].startswith("how right it was: balanced accuracy 0.700")


SKIN = '[BKL]\nname = "Warty mole"\nmeaning = "Not looked into."\nmalignancy = "unknown"\n'


def test_damaged_tune_scores_are_one_sentence(tmp_path, predictor):
    folder = write_run(tmp_path / "run", predictor)
    (folder / "tune").mkdir()
    (folder / "tune" / "north.safetensors").write_bytes(b"no tensors")
    result = call("bundle", folder, "--site", "north", "--sign", make_key(tmp_path), "-o", tmp_path / "m.edgefl")
    assert_refused(result, 1, "cannot be read", "--resume")


def test_a_card_says_that_the_network_was_never_trained(run_folder, predictor, tmp_path):
    """docs/design.md 7: the run stands on `tiny`; another one like it, on a network that a run without labels left."""
    trained = write_run(tmp_path / "run", predictor)
    spec, weights = predictor.module.backbone.spec, weights_of(predictor.module.backbone.network)
    for learned, told in ((True, False), (False, True)):
        (trained / BACKBONE_FILE).write_bytes(backbone_bytes(spec, weights, self_supervised=True, learned=learned))
        run = open_run(trained)
        other = replace(run, settings=replace(run.settings, backbone="run:/nowhere"))
        assert assemble.site_model(other, "north").card.untrained is told
    assert assemble.site_model(open_run(run_folder), "north").card.untrained


def test_class_information_that_is_wrong_stops_before_the_tracing(tmp_path, run_folder):
    """One sentence and exit 2; no bundle."""
    (tmp_path / "classes.toml").write_text(SKIN.replace("BKL", "wart"))
    arguments = ["bundle", run_folder, "--site", "north", "--sign", make_key(tmp_path), "-o", tmp_path / "m.edgefl"]
    result = call(*arguments, "--class-info", tmp_path / "classes.toml")
    assert_refused(result, 2, "no class 'wart'", "MEL, NV, BKL")
    assert "tracing" not in result.stderr and not (tmp_path / "m.edgefl").exists()
    assert_refused(call(*arguments, "--class-info", tmp_path / "none.toml"), 1, "none.toml")


def make_key(folder):
    assert call("keygen", folder / "keys").exit_code == 0
    return folder / "keys"


def test_verify_accepts_the_right_key(built):
    """Exit 0 and one line that names bundle and signer."""
    result = call("verify", built["file"], "--trust", built["pub"])
    assert result.exit_code == 0 and result.stdout.startswith("verified main/all version 1, signed by ")
    facts = json.loads(call("verify", built["file"], "--trust", built["pub"], "--json").stdout)
    assert facts["verified"] is True and facts["version"] == 1


def test_verify_refuses_another_key(built, tmp_path):
    """docs/security.md check 31: a bundle signed by somebody else is refused with exit 3."""
    call("keygen", tmp_path / "other")
    assert_refused(call("verify", built["file"], "--trust", tmp_path / "other" / "signing.pub"), 3, "is signed by")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_verify_refuses_a_flipped_bit_anywhere(built, tmp_path, place, bit):
    """docs/security.md checks 27 and 31: whichever bit of the file changes, verify exits 3 and claims nothing."""
    data = bytearray(built["file"].read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    broken = tmp_path / "broken.edgefl"
    broken.write_bytes(data)
    assert_refused(call("verify", broken, "--trust", built["pub"]), 3)


def test_verify_refuses_an_expired_bundle(built, members, tmp_path):
    """docs/security.md check 31: past its time a bundle is refused, although its signature is right."""
    fields = BundleFields(federation=None, line="main", task="all", version=1, created_ms=1000, expires_ms=2000)
    old = tmp_path / "old.edgefl"
    old.write_bytes(build_bundle(members.files, fields, [open_key(built["keys"], None)]))
    assert_refused(call("verify", old, "--trust", built["pub"]), 3, "expired")


@pytest.mark.parametrize("broken", [b"", b"PK", b"not a zip" * 100])
def test_verify_and_inspect_refuse_what_is_no_bundle(built, tmp_path, broken):
    """Whatever the file is, the answer is one sentence and exit 3."""
    (tmp_path / "x").write_bytes(broken)
    assert_refused(call("verify", tmp_path / "x", "--trust", built["pub"]), 3)
    assert_refused(call("inspect", tmp_path / "x"), 3)


def test_missing_files_fail_with_one_sentence(built, tmp_path):
    """A file that is not there, a public key that is none."""
    assert_refused(call("verify", tmp_path / "none", "--trust", built["pub"]), 1, "does not exist")
    assert_refused(call("verify", built["file"], "--trust", built["file"]), 3, "is a model, not its signer")
    (tmp_path / "text").write_text("hello")
    assert_refused(call("verify", built["file"], "--trust", tmp_path / "text"), 3, "not an Ed25519 public key")


def test_inspect_shows_claims_and_says_they_are_unchecked(built):
    """`inspect` needs no key and never calls anything verified."""
    text = call("inspect", built["file"]).stdout
    assert text.startswith("not verified; the file claims:") and "score.onnx" in text and "fedevprompt" in text
    facts = json.loads(call("inspect", built["file"], "--json").stdout)
    assert facts["verified"] is False and facts["labels"]["classes"] == ["MEL", "NV", "BKL"]
    assert facts["sha256"] == json.loads(built["out"].read_text())["sha256"]


def test_unknown_site_and_unfinished_run_are_told(built, run_folder, tmp_path):
    """A site the run has no model of, and a folder that is no run: one sentence each, no file left behind."""
    arguments = ["--sign", built["keys"], "-o", tmp_path / "m.edgefl"]
    assert_refused(call("bundle", run_folder, "--site", "south", *arguments), 2, "south", "north")
    assert_refused(call("bundle", tmp_path, "--site", "north", *arguments), 2, "not a run directory")
    assert not (tmp_path / "m.edgefl").exists()


def test_failed_gate_leaves_no_bundle(built, run_folder, graph, tmp_path, monkeypatch):
    """Export gates: else no bundle; exit 1."""
    monkeypatch.setattr(assemble, "export_score_graph", lambda module, tensors, form: ScoreGraph(graph, "1.23"))
    monkeypatch.setattr(score_parity, "TOLERANCES", dict.fromkeys(score_parity.TOLERANCES, -1.0))
    result = call("bundle", run_folder, "--site", "north", "--sign", built["keys"], "-o", tmp_path / "m.edgefl")
    assert_refused(result, 1, "no bundle is made")
    assert not (tmp_path / "m.edgefl").exists()


@pytest.mark.parametrize(
    "option",
    [("--line", "Über"), ("--version", "0"), ("--federation", "a b"), ("--precision", "int4"), ("--float-layers", "4"),
     ("--version", "3000000000"), ("--expires-days", "36501"), ("--created", "253402300800")],
)  # fmt: skip
def test_wrong_options_are_usage_errors(built, run_folder, tmp_path, option):
    """Exit 2 before any work."""
    result = call(
        "bundle", run_folder, "--site", "north", "--sign", built["keys"], "-o", tmp_path / "m.edgefl", *option
    )
    assert_refused(result, 2, option[0])


NEEDED = ("torch", "onnx", "onnxscript", "timm")


def without(missing, *arguments):
    """`edgefl-export` in a process of its own in which these packages are not installed."""
    block = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); from edgefl_export.cli import main; main()"
    command = [sys.executable, "-c", block, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("missing", NEEDED)
def test_base_install_names_the_missing_extra(built, run_folder, tmp_path, missing):
    """docs/design.md, section 2: without its extra the command exits 2 with a sentence."""
    bundle = ("bundle", run_folder, "--site", "north", "--sign", built["keys"], "-o", tmp_path / "m.edgefl")
    refused = without((missing,), *bundle)
    assert refused.returncode == 2 and "needs edgefl-derm[export]" in refused.stderr and refused.stdout == ""


def test_what_needs_no_extra_works_in_the_base_install(built):
    """docs/design.md, section 2: help, and looking at a bundle."""
    assert without(NEEDED, "--help").returncode == 0
    assert without(NEEDED, "verify", built["file"], "--trust", built["pub"]).returncode == 0


def test_a_bundle_is_never_written_over_a_file_nor_beside_its_like(built, run_folder, tmp_path):
    """Refused before anything is traced; the folder is left as it was."""
    here = tmp_path / "here"
    here.mkdir()
    copy = here / "first.edgefl"
    copy.write_bytes(built["file"].read_bytes())
    given = ["bundle", run_folder, "--site", "north", "--sign", built["keys"]]
    assert_refused(call(*given, "-o", copy), 1, "exists already", "--force")
    assert_refused(call(*given, "-o", here / "none" / "m.edgefl", "--force"), 1, "none is no folder", "m.edgefl")
    assert_refused(call(*given, "-o", here / "second.edgefl"), 1, "first.edgefl already is version 1", "--version 2")
    assert [path.name for path in here.iterdir()] == ["first.edgefl"]
    assert copy.read_bytes() == built["file"].read_bytes()


@pytest.mark.parametrize(
    ("federation", "line", "task", "version", "alike"),
    [
        (None, "main", "all", 1, True),
        ("skin", "main", "all", 1, False),
        (None, "small", "all", 1, False),
        (None, "main", "nevus", 1, False),
        (None, "main", "all", 2, False),
    ],
)
def test_bundles_are_alike_by_federation_line_task_and_version(built, federation, line, task, version, alike):
    there = built["file"]
    found = unverified_manifest(there.read_bytes())[0]
    assert (found.federation, found.line, found.task, found.version) == (None, "main", "all", 1)
    with pytest.raises(ExportError) if alike else contextlib.nullcontext():
        check_alone(there.parent / "new.edgefl", federation, line, task, version)
    check_alone(there, federation, line, task, version)  # itself does not count: --force overwrites it
