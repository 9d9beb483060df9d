"""The map that is shown, on its way into a bundle: measured on the run, traced, gated, and said in the card."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from edgefl_export import cli
from edgefl_export.bundles.shown_map import measured_map, with_map
from edgefl_export.errors import GateError
from edgefl_export.graphs.fused import FusedScore
from edgefl_export.graphs.score import export_score_graph
from edgefl_export.parity.score_parity import check_parity, compare
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.bundle.onnx_rules import check_score_graph
from edgefl_protocol.bundle.shown_map import ShownMap
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.shown_maps import graph_maps

KINDS = [("cls", "attention"), ("cls", "values"), *(("mean", k) for k in ("rollout", "attention", "values", "share"))]


@pytest.mark.parametrize(("readout", "kind"), KINDS)
@pytest.mark.parametrize("prefix_mode", ["renormalise", "sink"])
def test_the_fused_form_shows_the_trainers_map(make, readout, kind, prefix_mode):
    """Quick twin of the traced graph: the fused form, run by PyTorch, with prompts in both modes."""
    predictor = make(readout=readout, prefix_mode=prefix_mode)
    module = ScoreModule(predictor.module.backbone, predictor.module.options, kind).eval()
    images = torch.randint(0, 256, (3, 36, 36, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in predictor.tensors.items()}
    with torch.inference_mode():
        expected, found = module(images, tensors), FusedScore(module)(images, tensors)
    torch.testing.assert_close(found.shown, expected.shown, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.map, expected.map, rtol=1e-3, atol=1e-4)


TRACED = [("cls", "values", "fused"), ("mean", "rollout", "fused"), ("mean", "share", "fused"), (*KINDS[0], "plain")]
OTHERS = [(*KINDS[0], "fused"), *((*KINDS[i], "fused") for i in (3, 4)), *((*KINDS[i], "plain") for i in (2, 5))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("readout", "kind", "form"), [*TRACED, *(pytest.param(*one, marks=pytest.mark.nightly) for one in OTHERS)]
)
def test_the_traced_graph_shows_the_trainers_map(make, images, readout, kind, form):
    """Export gates: `shown` within 1e-3 on 64 images, by onnxruntime; a device accepts the graph."""
    predictor = make(readout=readout)
    module = ScoreModule(predictor.module.backbone, predictor.module.options, kind).eval()
    graph = export_score_graph(module, predictor.tensors, form).onnx
    figures = check_parity(graph, module, predictor.tensors, images)
    assert [figure.quantity for figure in figures] == list(module.outputs) and module.outputs[-1] == "shown"
    assert tuple(check_score_graph(graph, predictor.tensors, 36, ("MEL", "NV", "BKL")).outputs) == module.outputs


def test_the_gate_of_the_shown_map_asks_for_the_same_class_alone():
    """A share is of the class that is named: where two classes are level, either may be."""
    expected = {"probabilities": np.array([[0.5, 0.5], [0.9, 0.1]], np.float32), "shown": np.ones((2, 4), np.float32)}
    other = {"probabilities": np.array([[0.49999, 0.50001], [0.9, 0.1]], np.float32), "shown": expected["shown"].copy()}
    other["shown"][0] = -1
    assert {one.quantity: one.passed for one in compare(expected, other, 1)}["shown"]
    other["shown"][1, 2] += 1.1e-3
    assert not {one.quantity: one.passed for one in compare(expected, other, 1)}["shown"]


def test_an_occlusion_map_is_gated(predictor, graph, images):
    """The fall of probabilities by graph and trainer; with other tensors the gate shuts."""
    figures = check_parity(graph, predictor.module, predictor.tensors, images, 49)
    (found,) = [figure for figure in figures if figure.quantity == "occlusion"]
    assert 0 <= found.worst <= found.allowed == 2e-2
    other = {**predictor.tensors, "head.bias": predictor.tensors["head.bias"] + np.float32([0, 1, 0])}
    with pytest.raises(GateError):
        check_parity(graph, predictor.module, {**other}, images[:3], 49)


def test_only_a_map_that_is_shown_and_needs_it_gets_an_output(make, lab):
    mean, cls = make(readout="mean").module, make().module
    for kind in graph_maps(mean.backbone, "mean"):
        assert with_map(mean, lab.true_map(kind)).shown == kind
        assert with_map(mean, lab.true_map(kind, why="chance")) is mean
    assert with_map(cls, lab.true_map("rollout")) is cls  # the graph's own map
    assert with_map(cls, lab.true_map("occlusion", cells=49)) is cls
    assert with_map(cls, None) is cls


@pytest.fixture(scope="module")
def measured_run(run_folder, tmp_path_factory):
    """The run, with a drawn federation behind it that names its site `north`."""
    folder = shutil.copytree(run_folder, tmp_path_factory.mktemp("maps") / "run")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("sites=2,images=4,", "sites=1,images=400,"))
    return folder


def test_maps_are_measured_on_tune_rows_alone(measured_run, monkeypatch):
    """docs/design.md, rows: neither what learned nor what is reported; without the pictures it says so."""
    from edgefl_export.bundles import shown_map

    run = open_run(measured_run)
    federation = shown_map.federation_of(run)
    (site,) = federation.sites
    seen = {}

    def measure(predictor, images, lesions, questions, report):
        seen["images"] = images
        return SimpleNamespace(shown="measured")

    monkeypatch.setattr(shown_map, "measure_maps", measure)
    predictor = run.predictor("north")
    with monkeypatch.context() as drawn_once:
        drawn_once.setattr(shown_map, "federation_of", lambda run: federation)
        assert measured_map(run, site, predictor, lambda line: None) == "measured"
        few = measured_map(run, "north", predictor, lambda line: None)
    tune = {federation.images[row].tobytes() for row in federation.sites[site].tune}
    assert {image.tobytes() for image in seen["images"]} == tune and len(tune) >= 32
    assert few == ShownMap(why="few_pictures", kind=None)
    config = measured_run / "config.toml"
    before = config.read_text()
    try:
        config.write_text(before.replace("lesions:sites=1,images=400,classes=NV+MEL+BKL", "manifest:/gone.zip"))
        said: list[str] = []
        assert measured_map(open_run(measured_run), site, predictor, said.append).why == "no_pictures"
        assert "no map will be shown" in said[0]
    finally:
        config.write_text(before)


def test_the_card_of_the_command_line_says_why_no_map_is_shown(built):
    """The run's data has no site of that name, so nothing could be measured: a device draws none."""
    facts = json.loads(built["out"].read_text())
    assert facts["map"]["why"] == "few_pictures" and facts["map"]["shown"] is False
    card = load_bundle(built["file"].read_bytes(), [bytes.fromhex(built["pub"].read_text())], now_ms=2**41).card
    assert card.map == ShownMap.from_json(facts["map"])


@pytest.mark.slow
def test_a_bundle_carries_the_map_that_was_found_true(measured_run, tmp_path, lab, shared, monkeypatch):
    """Through the command line: the card, the text, and a graph whose occlusion passed its gate."""
    from edgefl_export.bundles import shown_map

    true = lab.true_map("occlusion", cells=36)
    monkeypatch.setattr(shown_map, "measured_map", lambda *_: true)
    call = CliRunner()
    assert call.invoke(cli.main, ["keygen", str(tmp_path / "keys")]).exit_code == 0
    output = tmp_path / "m.edgefl"
    arguments = ["bundle", str(measured_run), "--site", "north", "--sign", str(tmp_path / "keys"), "-o", str(output)]
    with shared.traces():
        made = call.invoke(cli.main, arguments)
    assert made.exit_code == 0, made.stderr
    assert (
        "map shown: occlusion. Measured on 96 pictures: hiding the strongest quarter" in made.stdout
        and "  occlusion " in made.stdout
    )
    trust = [bytes.fromhex((tmp_path / "keys" / "signing.pub").read_text())]
    assert load_bundle(output.read_bytes(), trust, now_ms=2**41).card.map == true
