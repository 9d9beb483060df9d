"""A picture for which memory does not suffice costs no other one. Source: docs/reference/pictures.md, `too_large`."""

import json

import pytest

from edgefl_client.scoring import scorer
from edgefl_client.scoring.drawing import score_picture
from edgefl_client.scoring.network import Network

OPTIONS = ("--model", "model.edgefl", "--trust", "signing.pub", "--threads", "1")
LARGE_PX = 90  # of the one side that only the large picture has


def scarce(*_given, **_named):
    raise MemoryError


def at_the_large(where, name, monkeypatch):
    """Let a function whose first argument is a picture lack memory for the large one alone."""
    real = getattr(where, name)
    monkeypatch.setattr(
        where, name, lambda image, *rest, **more: (scarce if LARGE_PX in image.shape else real)(image, *rest, **more)
    )


@pytest.fixture
def day(files, lab):
    """A folder of three pictures, the second of them large."""
    (files / "day").mkdir()
    for name, side in (("a", 40), ("b", LARGE_PX), ("c", 40)):
        (files / "day" / f"{name}.png").write_bytes(lab.encoded(lab.photo(side, 50)))
    return files / "day"


@pytest.fixture(params=[("score", "--json"), ("watch", "--once", "--interval", "0.1")], ids=["score", "watch"])
def called(request, run):
    command, *more = request.param
    return lambda *options: run(command, "day", *more, *OPTIONS, *options)


def told(out):
    """Of each picture its first letter, and the code of its error; None of a score."""
    lines = [json.loads(line) for line in out.splitlines()]
    return [(line["image"].rsplit("/", 1)[1][0], line.get("error", {}).get("code")) for line in lines]


def test_one_large_picture_costs_no_other(called, day, monkeypatch):
    """It ended the command; a watch met it again at each start, and no picture behind it was ever scored."""
    at_the_large(scorer, "prepare_turned", monkeypatch)
    code, out, _ = called()
    assert (code, told(out)) == (1, [("a", None), ("b", "too_large"), ("c", None)])
    assert "there is not enough memory for this picture: reduce it" in out


@pytest.mark.parametrize("batch", ["1", "8"])
def test_the_networks_run_is_tried_for_each_alone(run, day, monkeypatch, batch):
    """Eight pictures may be too many where one is not."""
    real = Network.run
    monkeypatch.setattr(Network, "run", lambda self, pixels, *rest, **more: (
        real if len(pixels) == 1 else scarce)(self, pixels, *rest, **more))  # fmt: skip
    code, out, _ = run("score", "day", "--json", "--batch", batch, *OPTIONS)
    assert (code, told(out)) == (0, [("a", None), ("b", None), ("c", None)])
    monkeypatch.setattr(Network, "run", scarce)
    code, out, _ = run("score", "day", "--json", "--batch", batch, *OPTIONS)
    assert (code, told(out)) == (1, [("a", "too_large"), ("b", "too_large"), ("c", "too_large")])


@pytest.mark.parametrize(
    ("error", "words"), [(MemoryError(), "not enough memory"), (OSError(5, "x"), "cannot be used")]
)
def test_a_heat_map_that_cannot_be_drawn_costs_no_score(called, day, monkeypatch, error, words):
    def fails(*_):
        raise error

    monkeypatch.setattr(score_picture, "draw_heatmap", fails)
    code, out, err = called("--heatmap", "maps")
    assert (code, told(out)) == (1, [("a", None), ("b", None), ("c", None)])
    assert err.count("no heat map: ") == 3 == err.count(words)
