"""Scores against an oracle written from the formulas, and the referral rules."""

import io
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper
from PIL import Image

from edgefl_client import Scorer
from edgefl_client.runtime import load_graph
from edgefl_client.scoring.network import ScoreError
from edgefl_protocol.errors import BundleError, ImageError
from edgefl_protocol.payload import digest
from edgefl_protocol.pictures.preprocess import TaughtPictures, prepare


def oracle(bundle, pixels):
    """docs/methods.md, sections 1.3 and 1.8, in numpy."""
    w = bundle.weights
    features = prepare(pixels, bundle.preprocess).astype(float).mean((0, 1)) / 255
    logits = (w["head.weight"].astype(float) @ features + w["head.bias"]) / w["temperature"]
    e = np.log1p(np.exp(logits))
    alpha = e + w["prior"]
    s = alpha.sum()
    b = e / s
    dissonance = 0.0
    for k in range(len(b)):
        rest = [j for j in range(len(b)) if j != k]
        balance = [1 - abs(b[j] - b[k]) / (b[j] + b[k]) if b[j] + b[k] > 0 else 0 for j in rest]
        total = b[rest].sum()
        dissonance += b[k] * (b[rest] @ balance) / total if total > 0 else 0
    p = alpha / s
    return p, e, len(b) / s, dissonance, -(p * np.log(p)).sum()


@given(pixels=arrays(np.uint8, (27, 33, 3)))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_measures_follow_the_formulas(lab, plain_bundle, pixels):
    """docs/methods.md, 1.8: vacuity, dissonance, entropy; evidence at temperature T; tolerances of the export gates."""
    score = Scorer(plain_bundle, threads=1).score(pixels)
    p, e, vacuity, dissonance, entropy = oracle(plain_bundle, pixels)
    assert list(score.probabilities) == list(lab.CLASSES)
    assert np.allclose(list(score.probabilities.values()), p, atol=1e-4)
    assert np.allclose(list(score.evidence.values()), e, rtol=1e-4, atol=1e-4)
    assert score.vacuity == pytest.approx(vacuity, abs=1e-4)
    assert score.dissonance == pytest.approx(dissonance, abs=1e-4)
    assert score.entropy_nats == pytest.approx(entropy, abs=1e-4)
    assert score.predicted == (None if "not_skin" in score.refer_reasons else lab.CLASSES[int(np.argmax(p))])


def test_json_keys_are_the_contract(lab, plain_bundle):
    """docs/design.md, section 5: exactly these keys, this nesting, these types."""
    value = Scorer(plain_bundle, threads=1).score(lab.photo(), "a.png").to_json()
    assert list(value) == [
        "image", "predicted", "probabilities", "evidence", "vacuity", "dissonance", "entropy_nats", "refer",
        "refer_reasons", "heatmap", "model", "milliseconds", "predicted_name", "malignancy", "suspicious_probability",
        "suspicious_from", "rules_tried", "exposure", "suspicious_rule", "vacuity_from", "dissonance_from",
        "entropy_from", "heatmap_fall", "light", "transparent",
        "learned_from", "suspicious_tried", "turned_suspicious_probability",
        "learned_from_federation",
    ]  # fmt: skip
    assert list(value["model"]) == ["id", "sha256", "version", "state", "better_than_chance", "warnings", "site"]
    assert value["model"]["state"] == {"kind": "bundle", "sha256": digest(lab.WEIGHTS)}
    assert value["model"]["sha256"] == plain_bundle.sha256
    assert value["model"]["id"] == "skin/main/all"
    assert value["image"] == "a.png"
    assert value["heatmap"] is None
    assert value["refer"] is bool(value["refer_reasons"])
    assert isinstance(value["milliseconds"], float)
    assert value["milliseconds"] > 0


def test_bytes_pillow_and_array_score_alike(lab, plain_bundle):
    """docs/design.md, section 6: score(image: bytes | PIL.Image | uint8 (H, W, 3))."""
    scorer = Scorer(plain_bundle, threads=1)
    pixels = np.random.default_rng(3).integers(0, 256, (30, 44, 3)).astype(np.uint8)
    data = lab.encoded(pixels)
    scores = [scorer.score(data), scorer.score(Image.fromarray(pixels)), scorer.score(pixels)]
    assert scores[0].probabilities == scores[1].probabilities == scores[2].probabilities


def test_batch_equals_single(lab, plain_bundle):
    scorer = Scorer(plain_bundle, threads=1)
    photos = [lab.photo(colour=(40 * k, 250 - 30 * k, 90)) for k in range(5)]
    together = scorer.score_batch(photos, [f"{k}" for k in range(5)])
    assert [one.image for one in together] == ["0", "1", "2", "3", "4"]
    for one, alone in zip(together, (scorer.score(pixels) for pixels in photos), strict=True):
        # the tolerance of the export gates, docs/design.md, section 7
        assert np.allclose(list(one.evidence.values()), list(alone.evidence.values()), rtol=1e-4, atol=1e-4)
    assert scorer.score_batch([]) == []
    with pytest.raises(ValueError, match="2 pictures but 1 names"):
        scorer.score_batch(photos[:2], ["a"])


def test_an_absent_class_is_never_predicted_but_refers(lab, make_bundle):
    """docs/methods.md, 1.3: predict argmax alpha among seen classes; an unseen class on top refers."""
    red = {"head__weight": 8 * np.eye(3, dtype=np.float32)[::-1]}  # of the three, red speaks for BCC
    assert Scorer(make_bundle(**red), threads=1).score(lab.photo()).predicted == "BCC"
    score = Scorer(make_bundle(seen=(True, True, False), **red), threads=1).score(lab.photo())
    assert max(score.probabilities, key=score.probabilities.get) == "BCC"
    assert score.predicted == max(("MEL", "NV"), key=score.probabilities.get)
    assert "unseen_class" in score.refer_reasons


def test_without_evidence_nothing_is_predicted(lab, make_bundle):
    """docs/methods.md, 1.3: at vacuity >= 0.999 predict nothing and refer, whatever the threshold."""
    bundle = make_bundle(head__bias=np.full(3, -40, np.float32), refer_above=None)
    score = Scorer(bundle, threads=1).score(lab.photo())
    assert score.vacuity >= 0.999
    assert score.predicted is None
    assert "vacuity" in score.refer_reasons


def test_threshold_of_card_and_of_caller(lab, make_bundle):
    """docs/methods.md, 1.8: refer = vacuity > threshold."""
    bundle = make_bundle(refer_above=0.9)
    vacuity = Scorer(bundle, threads=1).score(lab.photo()).vacuity
    assert 0.05 < vacuity < 0.9
    assert Scorer(bundle, threads=1).score(lab.photo()).refer_reasons == ()
    assert Scorer(bundle, threads=1, refer_above=vacuity / 2).score(lab.photo()).refer_reasons == ("vacuity",)
    at = Scorer(bundle, threads=1, refer_above=vacuity).score(lab.photo())
    assert "vacuity" not in at.refer_reasons  # above, not at; turned it may lie above by rounding


def test_dissonance_refers_only_where_the_card_says_from_where(lab, make_bundle):
    grey = lab.photo(colour=(200, 190, 180))
    assert Scorer(make_bundle(), threads=1).score(grey).dissonance > 0.2
    score = Scorer(make_bundle(metrics={"refer_dissonance_above": 0}), threads=1).score(grey)
    assert score.refer_reasons == ("dissonance",)
    assert "dissonance" in score.rules_tried and score.to_json()["dissonance_from"] == 0


@pytest.mark.parametrize("above", [5.0, 1.0])
def test_a_threshold_that_no_dissonance_can_exceed_is_none(lab, make_bundle, above):
    """docs/reference/scores.md, `dissonance_from` and `rules_tried`: it is at most 1 - vacuity (methods.md 1.8)."""
    score = Scorer(make_bundle(metrics={"refer_dissonance_above": above}), threads=1).score(lab.photo())
    assert score.to_json()["dissonance_from"] is None and "dissonance" not in score.rules_tried


@pytest.mark.parametrize(
    ("width", "height", "small"), [(24, 24, False), (23, 50, True), (50, 23, True), (24, 25, False)]
)
def test_size_refers_below_the_networks_input(lab, plain_bundle, width, height, small):
    """A picture of one pixel had a class; docs/reference/picture-gate.md says that none is predicted."""
    score = Scorer(plain_bundle, threads=1).score(lab.photo(width, height))
    assert ("size" in score.refer_reasons) is small
    assert (score.predicted is None) is small and (score.judged or score.to_json()["predicted_name"] is None)


def test_a_picture_as_small_as_the_taught_ones_is_scored(lab, make_bundle):
    """The network reads 24 px and learned from 20 px: such a picture is what it knows, and one of 19 px is not."""
    scorer = Scorer(make_bundle(taught=TaughtPictures(side=20)), threads=1)
    assert "size" not in scorer.score(lab.photo(20, 20)).refer_reasons
    assert scorer.score(lab.photo(20, 20)).predicted is not None
    assert "size" in scorer.score(lab.photo(19, 30)).refer_reasons


def test_a_photograph_is_scored_as_the_taught_ones_were(lab, make_bundle):
    """What the score says of a camera's picture is what it says of the same, shrunk and saved as the taught ones."""
    photo, taught = lab.photo(300, 200), TaughtPictures(side=20, jpeg_quality=30)
    file = io.BytesIO()
    small = Image.fromarray(np.asarray(photo)).resize((20, 20), Image.Resampling.BICUBIC)
    small.save(file, "JPEG", quality=30)
    scorer = Scorer(make_bundle(taught=taught), threads=1)
    found, wanted = scorer.score(photo).probabilities, scorer.score(file.getvalue()).probabilities
    assert found == pytest.approx(wanted, abs=1e-6)
    assert found != pytest.approx(Scorer(make_bundle(), threads=1).score(photo).probabilities, abs=1e-6)


def test_a_scorer_that_outlives_its_bundle_refers(lab, make_bundle):
    bundle = make_bundle(expires_ms=lab.NOW_MS + 1000)
    now = [lab.NOW_MS]
    scorer = Scorer(bundle, threads=1, clock=lambda: now[0])
    assert "model_expired" not in scorer.score(lab.photo()).refer_reasons
    now[0] = lab.NOW_MS + 1000
    assert "model_expired" in scorer.score(lab.photo()).refer_reasons


def test_softmax_model_has_no_evidence(lab, make_bundle):
    """docs/design.md, section 5: softmax methods: evidence, vacuity and dissonance null; the threshold is entropy."""
    bundle = make_bundle(softmax=True, refer_above=0.9)
    score = Scorer(bundle, threads=1).score(lab.photo(colour=(112, 104, 96)))
    assert (score.evidence, score.vacuity, score.dissonance) == (None, None, None)
    assert score.entropy_nats > 0.9
    assert score.refer_reasons == ("vacuity",)
    assert score.predicted is not None


def test_a_network_without_attention_has_no_map(lab, make_bundle):
    assert Scorer(make_bundle(with_map=False), threads=1).score(lab.photo()).map is None


def test_numbers_that_are_not_finite_are_no_score(lab, make_bundle):
    bundle = make_bundle(temperature=np.array(0.0, np.float32), head__bias=np.zeros(3, np.float32))
    with pytest.raises(ScoreError, match="not finite"):
        Scorer(bundle, threads=1).score(lab.photo(colour=(0, 0, 0)))


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"threads": 2000}, {"refer_above": -0.1}, {"refer_above": 0.999}, {"refer_above": float("nan")}],
)
def test_options_out_of_range(plain_bundle, options):
    with pytest.raises(ValueError, match="allowed"):
        Scorer(plain_bundle, **options)


def test_an_unreadable_picture_is_a_typed_error(plain_bundle):
    with pytest.raises(ImageError):
        Scorer(plain_bundle, threads=1).score(b"no picture")
    with pytest.raises(ImageError):
        Scorer(plain_bundle, threads=1).score(np.zeros((4, 4), np.uint8))


def test_a_4_to_3_photo_is_squashed_not_cropped(lab, make_bundle):
    """docs/design.md, section 7: fit squash uses the whole photo, crop its centred square."""
    pixels = np.zeros((60, 80, 3), np.uint8)
    pixels[:, :8] = 255  # only at the left edge, outside the centred square
    squash = Scorer(make_bundle(), threads=1).score(pixels).map.reshape(6, 6)
    crop = Scorer(make_bundle(fit="crop"), threads=1).score(pixels).map.reshape(6, 6)
    assert squash[:, 0].min() > 0.9
    assert crop.max() < 0.01


@pytest.mark.parametrize(
    ("version", "allowed"),
    [
        ("1.22.9", False),
        ("0.99", False),
        ("1.23", True),
        ("1.23.0", True),
        ("1.100.0", True),
        ("1.24.0.dev2025+x", True),
    ],
)
def test_a_runtime_older_than_the_bundle_asks_for_is_refused(plain_bundle, monkeypatch, version, allowed):
    """docs/design.md, section 7: `min_runtime` of the manifest, 1.23 here, compared as versions are."""
    monkeypatch.setattr(onnxruntime, "__version__", version)
    if allowed:
        Scorer(plain_bundle, threads=1)
        return
    with pytest.raises(BundleError, match=r"needs onnxruntime 1\.23 or newer") as refused:
        Scorer(plain_bundle, threads=1)
    assert refused.value.code == "runtime_too_old"


@pytest.fixture
def with_external_data(tmp_path, monkeypatch):
    """A graph that adds a constant kept in `outside.bin`, which lies in the current folder."""
    (tmp_path / "outside.bin").write_bytes(np.full(3, 7, np.float32).tobytes())
    monkeypatch.chdir(tmp_path)
    stored = onnx.TensorProto(name="c", dims=[3], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    stored.external_data.add(key="location", value="outside.bin")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "c"], ["y"])], "g", ends[:1], ends[1:], [stored])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return model.SerializeToString()


def test_the_runtime_reads_no_file_beside_the_graph(with_external_data):
    """docs/security.md, attack list 1: external data is refused here too, should it get past the bundle's checks."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(Path.cwd()))
    named = onnxruntime.InferenceSession(with_external_data, options, providers=["CPUExecutionProvider"])
    assert named.run(None, {"x": np.zeros(3, np.float32)})[0].tolist() == [7, 7, 7]  # the graph itself is sound
    with pytest.raises(BundleError) as error:
        load_graph(with_external_data, 1)
    assert error.value.code == "graph_load"


def test_the_runtime_reads_no_format_but_the_checked_one(plain_bundle, tmp_path):
    """docs/security.md, attack list 3: the bundle's checks read ONNX; a file of onnxruntime's own format, which it
    would tell by four bytes, is not run."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(plain_bundle.score_onnx, options, providers=["CPUExecutionProvider"])
    saved = (tmp_path / "model.ort").read_bytes()
    assert saved[4:8] == b"ORTM"
    onnxruntime.InferenceSession(saved, providers=["CPUExecutionProvider"])  # the file itself is sound
    with pytest.raises(BundleError) as error:
        load_graph(saved, 1)
    assert error.value.code == "graph_load"
