"""What `edgefl doctor` and `status` say of the model in use. Source: docs/reference/doctor.md and scores.md."""

import json

from tests.edge_client.doctor.conftest import diagnosed


def test_a_model_that_says_nothing_of_its_classes_is_told(run, device, live, lab, tmp_path):
    """docs/reference/scores.md: it asks for a look at every picture, and only its publisher can mend that."""
    (tmp_path / "old.edgefl").write_bytes(lab.bundle_bytes(version=2, info=None))
    _, found = diagnosed(run, "--offline", "--model", tmp_path / "old.edgefl")
    assert found["model"]["state"] == "warn" and "which of its classes are benign" in found["model"]["found"]
    assert "class information" in found["model"]["advice"]


DAY_MS = 86_400_000
AT_CHANCE = {
    "site": {
        "n_test": 17, "classes_tested": 2, "balanced_accuracy": 0.496, "balanced_accuracy_interval": [0.21, 0.75],
        "auroc": 0.489, "auroc_interval": [0.29, 0.87],
    }
}  # fmt: skip


def test_a_model_that_is_not_better_than_chance_is_told_everywhere(run, lab, tmp_path):
    """docs/reference/scores.md, "How good the model is": use, status, score and doctor say what the card says."""
    (tmp_path / "weak.edgefl").write_bytes(lab.bundle_bytes(version=2, metrics=AT_CHANCE))
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo(300, 300)))
    _, out, _ = run("use", tmp_path / "weak.edgefl", "--trust", lab.SIGNER.public.hex())
    code, told, _ = run("status", "--offline")
    for text in (out, told):
        assert "balanced accuracy 0.496 (95% interval 0.210 to 0.750, chance 0.500)" in text and "17 pictures" in text
        assert "not found better than chance" in text
    _, out, err = run("score", tmp_path / "a.png", tmp_path / "a.png")  # once for the run: it is not about a picture
    assert err.count("not found better than chance") == 1 and "AUROC 0.489" in err and "chance" not in out
    _, out, _ = run("score", tmp_path / "a.png", "--json")
    assert json.loads(out)["model"]["better_than_chance"] is False
    _, found = diagnosed(run, "--offline", "--no-measure")
    assert found["quality"]["state"] == "warn" and "0.496" in found["quality"]["found"]
    code, out, _ = run("status", "--card")
    assert code == 0 and json.loads(out)["metrics"] == AT_CHANCE
    assert json.loads(run("status", "--offline", "--json")[1])["model"]["card"] == json.loads(out)


def test_without_a_model_nothing_is_said_of_weights(run, lab, tmp_path):
    """`edgefl status` of an empty home: there is no bundle whose values could be in use."""
    text = run("status")[1]
    assert "model: none\n" in text and "weights" not in text
    (tmp_path / "any.edgefl").write_bytes(lab.bundle_bytes())
    run("use", tmp_path / "any.edgefl", "--trust", lab.SIGNER.public.hex())
    assert "\nweights: the bundle's\n" in run("status")[1]


def test_a_model_that_is_mostly_wrong_is_no_ok(run, lab, tmp_path):
    """Two of three classes had pictures, and most of the answers were wrong, though better than guessing."""
    site = AT_CHANCE["site"] | {
        "balanced_accuracy_interval": [0.51, 0.75], "auroc_interval": [0.51, 0.9], "accuracy": 0.41,
    }  # fmt: skip
    (tmp_path / "wrong.edgefl").write_bytes(lab.bundle_bytes(version=2, metrics={"site": site}))
    _, out, _ = run("use", tmp_path / "wrong.edgefl", "--trust", lab.SIGNER.public.hex())
    told = run("status", "--offline")[1]
    _, found = diagnosed(run, "--offline", "--no-measure")
    assert found["quality"]["state"] == "warn"
    for text in (out, told, found["quality"]["found"]):
        assert "More than half of this model's answers were wrong: accuracy 0.410" in text
        assert "2 of 3 classes had pictures there" in text


def test_without_a_model_there_is_no_card_to_show(run):
    code, _, err = run("status", "--card")
    assert code == 1 and "no card to show" in err


def test_the_model(run, device, live, lab, tmp_path):
    """Expired, soon to expire, from an unknown signer, damaged: as `edgefl score` would find it."""
    now_ms = live.now_ms
    (tmp_path / "soon.edgefl").write_bytes(lab.bundle_bytes(version=2, expires_ms=now_ms + 3 * DAY_MS + 3_600_000))
    (tmp_path / "over.edgefl").write_bytes(lab.bundle_bytes(version=2, expires_ms=lab.NOW_MS + 1))
    _, found = diagnosed(run, "--offline", "--model", tmp_path / "soon.edgefl")
    assert found["model"]["state"] == "warn" and " ago and expires in 3 days" in found["model"]["found"]
    assert found["model"]["advice"] == "ask its publisher for a newer one"  # sync fetches none for a file
    assert "status --card" not in (found["quality"]["advice"] or "")  # nor is its card that of the model in use
    assert run("use", tmp_path / "soon.edgefl")[0] == 0
    assert "in a federation fetch it: edgefl sync" in diagnosed(run, "--offline")[1]["model"]["advice"]
    code, found = diagnosed(run, "--offline", "--model", tmp_path / "over.edgefl")
    assert (code, found["model"]["state"]) == (1, "fail") and "expire" in found["model"]["found"]
    run("trust", "remove", lab.SIGNER.public.hex())
    code, found = diagnosed(run, "--offline", "--model", tmp_path / "soon.edgefl")
    assert (code, found["model"]["state"]) == (1, "fail") and "trust" in found["model"]["found"]
