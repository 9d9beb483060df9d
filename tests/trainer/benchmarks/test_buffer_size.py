"""`benchmarks/training/buffer_size.py`: a step against a large and a small buffer of maps (docs/methods.md 1.5)."""

import json

from benchmarks.training import buffer_size
from click.testing import CliRunner

QUICK = ("--backbone", "tiny", "--image-px", "36", "--batch", "4", "--steps", "1", "--repeats", "1")


def test_the_figures_belong_together():
    """Ratios are those of the two sizes; exit status 1 says that the target was missed."""
    run = CliRunner().invoke(buffer_size.main, [*QUICK, "--large", "400", "--json"])
    found = json.loads(run.stdout)
    for name, ratio in (("elapsed_seconds_of_a_step", "elapsed_ratio"), ("cpu_seconds_of_a_step", "ratio")):
        assert list(found[name]) == ["10", "400"]
        assert all(value > 0 for value in found[name].values())
        assert found[ratio] == found[name]["400"] / found[name]["10"]
    assert set(found["folding_seconds"]) == {"10", "400"}
    assert (found["tokens"], found["batch"], found["target"]) == (9, 4, 1.1)
    assert run.exit_code == (0 if found["ratio"] <= 1.1 else 1)


def test_the_buffers_have_the_sizes_they_are_named_by():
    drawn = buffer_size.drawn_maps
    for size in (10, 400, 10_000):
        assert sum(len(maps) for maps in drawn(size, 9).values()) == size


def test_an_unknown_backbone_is_one_sentence():
    run = CliRunner().invoke(buffer_size.main, ["--backbone", "vit:nothing"])
    assert run.exit_code == 1 and run.stdout == "" and "Traceback" not in run.stderr
