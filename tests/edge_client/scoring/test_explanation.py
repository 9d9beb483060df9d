"""The map that a device shows: the one that its bundle found true, computed as it was measured; else none, and why."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, load_from_string

from edgefl_client import Scorer
from edgefl_client.scoring import network
from edgefl_client.scoring import scorer as scoring
from edgefl_client.scoring.drawing.score_picture import draw_heatmap
from edgefl_client.scoring.score_files import ScoringJob, score_files
from edgefl_protocol.bundle import build_bundle, load_bundle
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.shown_map import ShownMap, how_true
from edgefl_protocol.errors import EdgeflError


@pytest.fixture
def explained(lab, make_bundle):
    """A scorer of a bundle, a picture, its score and the explanation."""

    def explain(pixels=None, **options):
        scorer = Scorer(make_bundle(**options), threads=1)
        photo = lab.photo(48, 48) if pixels is None else pixels
        prepared = scorer.prepare(photo)
        score = scorer.score_batch([prepared])[0]
        return scorer, prepared, score, scorer.explain(prepared, score)

    return explain


@pytest.fixture
def also_level(monkeypatch):
    """Maps of small pictures are shown although they are nearly level: here their numbers count."""
    monkeypatch.setattr(scoring, "marks_nothing", lambda *_: False)


def test_the_rollout_is_the_map_of_the_graph(explained, lab):
    pixels = lab.photo(48, 48, (60, 40, 30))
    pixels[:16, :16] = 250  # of the tiny model, brightness is the map
    _, _, score, found = explained(pixels)
    np.testing.assert_array_equal(found.values, score.map)
    assert found.sentence == how_true(lab.true_map("rollout"))
    assert "changed 32 of 96 answers (33.3%)" in found.sentence and "changed 10.0% of the answers" in found.sentence


@pytest.mark.usefixtures("also_level")
@pytest.mark.parametrize("with_map", [True, False])
def test_occlusion_equals_brute_force(explained, lab, with_map):
    """Every cell hidden by hand and scored alone, for the class that is named; also for a network without attention."""
    pixels = lab.photo(24, 24)
    pixels[4:12, 8:16] = (230, 80, 70)
    occlusion = lab.true_map("occlusion", cells=36)
    scorer, prepared, score, found = explained(pixels, shown=occlusion, with_map=with_map)
    assert (score.map is not None) is with_map
    falls, mean = [], np.round(prepared.pixels.mean(axis=(0, 1))).astype(np.uint8)
    for cell in range(36):
        row, column = divmod(cell, 6)
        hidden = prepared.pixels.copy()
        hidden[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = mean
        without = scorer.score_batch([replace(prepared, pixels=hidden)])[0]
        falls.append(score.probabilities[score.predicted] - without.probabilities[score.predicted])
    assert found.values == pytest.approx(np.array(falls) / max(*falls, 0.01), abs=1e-4)
    assert score.probabilities[score.predicted] - found.without == pytest.approx(max(falls), abs=1e-5)


def test_a_device_runs_the_network_as_often_as_the_card_says(explained, lab, monkeypatch):
    """Once for the score and once for each cell, in batches that are small; three times more, turned, for a pass."""
    runs, original = [], network.run_graph

    def counted(graph, outputs, given, what):
        runs.append(len(given["image"]))
        return original(graph, outputs, given, what)

    monkeypatch.setattr(network, "run_graph", counted)
    occlusion = lab.true_map("occlusion", cells=36)
    explained(shown=occlusion)
    assert sum(runs) == occlusion.passes + 3 == 40 and max(runs) <= 8


def with_shown(lab, kind):
    """A bundle whose graph also gives `shown`: its map turned upside down."""
    data = lab.bundle_bytes()
    bundle = load_bundle(data, [lab.SIGNER.public], lab.NOW_MS)
    model = load_from_string(bundle.score_onnx)
    model.graph.node.append(helper.make_node("Neg", ["map"], ["shown"]))
    model.graph.output.append(helper.make_tensor_value_info("shown", TensorProto.FLOAT, ["B", lab.GRID**2]))
    found = read_archive(data)
    members = {name: found[name] for name in found if name not in ("manifest.json", "signatures.json")}
    members |= {
        "score.onnx": model.SerializeToString(),
        "card.json": replace(bundle.card, map=lab.true_map(kind)).to_bytes(),
    }
    manifest = bundle.manifest
    from edgefl_protocol.bundle import BundleFields

    fields = BundleFields(
        federation=manifest.federation, line=manifest.line, task=manifest.task, version=1, created_ms=lab.NOW_MS,
        expires_ms=None,
    )  # fmt: skip
    return load_bundle(build_bundle(members, fields, [lab.SIGNER]), [lab.SIGNER.public], lab.NOW_MS)


@pytest.mark.usefixtures("also_level")
@pytest.mark.parametrize("kind", ["rollout", "attention", "values", "share"])
def test_a_map_of_its_own_is_read_from_the_graph_and_the_other_still_travels(lab, kind):
    scorer = Scorer(with_shown(lab, kind), threads=1)
    usual = Scorer(load_bundle(lab.bundle_bytes(), [lab.SIGNER.public], lab.NOW_MS), threads=1)
    prepared = scorer.prepare(lab.photo(48, 48))
    score = scorer.score_batch([prepared])[0]
    assert score.to_json()["probabilities"] == usual.score(lab.photo(48, 48)).to_json()["probabilities"]
    np.testing.assert_array_equal(score.map, usual.score(lab.photo(48, 48)).map)
    np.testing.assert_array_equal(scorer.explain(prepared, score).values, -score.map)


def test_a_share_is_shown_of_the_class_that_is_named_alone(lab):
    """Of a class that was never seen the likeliest may be another than the one that is named."""
    scorer = Scorer(with_shown(lab, "share"), threads=1)
    prepared = scorer.prepare(lab.photo(48, 48))
    score = scorer.score_batch([prepared])[0]
    other = min(score.probabilities, key=score.probabilities.__getitem__)
    found = scorer.explain(prepared, replace(score, predicted=other))
    assert found.values is None and "another class" in found.sentence


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "does not say how true its map is"),
        (ShownMap(why="no_pictures", kind=None), "nobody could measure"),
        (ShownMap(why="few_pictures", kind=None, pictures=5), "5 pictures were too few"),
        ("chance", "little more than any other place"),
    ],
    ids=["an old bundle", "not measured", "too few", "at chance"],
)
def test_a_map_that_is_not_known_to_be_true_is_not_drawn(lab, make_bundle, tmp_path, run, said, words):
    """The picture comes without it, and caption and standard error say why; what travels is there all the same."""
    said = lab.true_map("rollout", why="chance") if said == "chance" else said
    scorer = Scorer(make_bundle(shown=said), threads=1)
    prepared = scorer.prepare(lab.photo(48, 48))
    score = scorer.score_batch([prepared])[0]
    found = scorer.explain(prepared, score)
    assert found.values is None and words in found.sentence
    assert score.map is not None and not scorer.score(lab.photo()).heatmap
    (tmp_path / "model.edgefl").write_bytes(lab.bundle_bytes(shown=said))
    (tmp_path / "signing.pub").write_text(lab.SIGNER.public.hex())
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo(60, 40)))
    code, _, err = run("score", "a.png", "--model", "model.edgefl", "--trust", "signing.pub", "--heatmap", "maps")
    assert code == 0 and words in err and len(list((tmp_path / "maps").glob("a-*.heatmap.png"))) == 1


@pytest.mark.parametrize(
    ("kind", "words"), [("rollout", "nearly the same everywhere"), ("occlusion", "no single part")]
)
def test_of_a_level_map_nothing_is_drawn_and_one_sentence_says_so(explained, lab, said, kind, words):
    """docs/reference/scores.md: no second photo, no scale of colours, and no figures of maps that are not there."""
    pixels = np.full((500, 600, 3), (210, 160, 140), np.uint8)  # the same everywhere
    cells = {"cells": 36} if kind == "occlusion" else {}
    scorer, _, score, found = explained(pixels, shown=lab.true_map(kind, **cells))
    assert found.values is None and words in found.sentence and "Measured" not in found.sentence
    picture = np.asarray(draw_heatmap(pixels, score, scorer.network.fit, found))
    assert (picture[:500, 600:] == 255).all()
    assert words in " ".join(said) and "least" not in " ".join(said) and "looked" not in " ".join(said)


@pytest.mark.parametrize(("fall", "drawn"), [(0.006, False), (0.019, False), (0.021, True)])
def test_parts_that_hardly_matter_are_not_outlined(explained, lab, monkeypatch, fall, drawn):
    """docs/reference/scores.md: below two points no part matters, and where a map is drawn its colours reach yellow."""
    scorer, prepared, score, _ = explained(shown=lab.true_map("occlusion", cells=36))
    without = np.full(36, score.probabilities[score.predicted], np.float32)
    without[7] -= fall
    left = iter(without)
    monkeypatch.setattr(
        network.Network,
        "run",
        lambda _self, pixels, _question: {"probabilities": np.array([[next(left)] * 3 for _ in pixels])},
    )
    found = scorer.explain(prepared, score)
    assert (found.values is not None) is drawn
    if drawn:
        assert found.values.max() == 1.0
    else:
        assert "no single part matters much to this answer" in found.sentence and "2 points" in found.sentence


@pytest.mark.usefixtures("also_level")
@pytest.mark.parametrize("kind", ["rollout", "occlusion"])
def test_the_fall_is_told_to_programs_where_parts_were_hidden(lab, make_bundle, tmp_path, kind):
    """docs/reference/scores.md: `heatmap_fall`."""
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo(60, 40)))
    scorer = Scorer(make_bundle(shown=lab.true_map(kind, **({"cells": 36} if kind == "occlusion" else {}))), threads=1)
    from edgefl_client.scoring.pictures import FORMATS, PictureReader

    with PictureReader(FORMATS) as reader:
        task = ScoringJob(scorer=scorer, reader=reader, heatmaps=tmp_path, not_drawn=pytest.fail)
        (result,) = score_files(task, [str(tmp_path / "a.png")])
    assert result.heatmap is not None and (result.to_json()["heatmap_fall"] is None) is (kind == "rollout")
    if kind == "occlusion":
        found = scorer.explain(scorer.prepare(lab.photo(60, 40)), result)
        assert result.heatmap_fall == result.probabilities[result.predicted] - found.without


def test_without_an_answer_there_is_no_map(explained, lab):
    scorer, prepared, score, _ = explained(shown=lab.true_map("occlusion", cells=36))
    found = scorer.explain(prepared, replace(score, predicted=None))
    assert found.values is None and "no prediction" in found.sentence


def test_a_map_that_fails_costs_no_score(lab, make_bundle, tmp_path, monkeypatch):
    """docs/reference/scores.md: its `heatmap` is null, and it is said why."""
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo(60, 40)))
    scorer = Scorer(make_bundle(shown=lab.true_map("occlusion", cells=36)), threads=1)

    def fails(self, *_):
        raise network.ScoreError("not finite")

    monkeypatch.setattr(network.Network, "occlusion", fails)
    from edgefl_client.scoring.pictures import FORMATS, PictureReader

    told: dict[str, EdgeflError] = {}
    with PictureReader(FORMATS) as reader:
        task = ScoringJob(scorer=scorer, reader=reader, heatmaps=tmp_path / "maps", not_drawn=told.__setitem__)
        (result,) = score_files(task, [str(tmp_path / "a.png")])
    assert (
        result.heatmap is None and result.predicted is not None and "not finite" in str(told[str(tmp_path / "a.png")])
    )
