"""docs/decisions/0073: a run notes what its pictures were like, and its models are judged and exported so."""

import json

from tests.trainer.conftest import edgefl_train

from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.engine.models import open_run


def test_a_run_of_small_pictures_says_so_and_notes_it(tmp_path, cached):
    out = tmp_path / "small"
    words = ("--preset", "tiny", "--backbone", "vit:64x2/12", "--set", "b_blocks=1", "--image-px", 36)
    data = ("--data", "lesions:sites=2,images=12,px=32", "--rounds", 1, "--epochs", 1)
    done = edgefl_train("run", "local", *data, *words, "--out", out)
    assert done.code == 0, done.err
    assert "at most 32 pixels a side, and the network reads 36" in " ".join(done.err.split())
    assert json.loads((out / "summary.json").read_text())["taught_pictures"] == {"side": 32, "jpeg_quality": None}
    assert open_run(out).preprocess.taught == TaughtPictures(side=32)
    assert open_run(out).preprocess.least_px == 32
