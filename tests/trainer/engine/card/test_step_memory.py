"""Memory of a step against PyTorch's own profiler, and the batch that `--batch auto` takes.

The profiler tells every block that the allocator of the processor gives and takes back (`torch.profiler`,
`profile_memory`); weights that were there before it began are added.
"""

import json
import tomllib
from typing import Any
from unittest import mock

import pytest
import torch
from tests.trainer.conftest import edgefl_train
from tests.trainer.methods.conftest import examples
from tests.trainer.pretended_card import pretended_card
from torch.profiler import ProfilerActivity, profile

from edgefl_trainer.contract import Site, Task
from edgefl_trainer.engine.card import step_memory
from edgefl_trainer.engine.card.step_memory import StepMemory
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.models.backbones import load_backbone

GIB = 1 << 30


class Profiled:
    """In the place of `LiveBytes`: the highest sum of the allocator's blocks."""

    peak = 0

    def __init__(self, kind: str) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> "Profiled":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        blocks = [one for one in results.events() if one.name() == "[memory]"]
        held = 0
        for one in sorted(blocks, key=lambda block: block.start_ns()):
            held += one.nbytes()
            self.peak = max(self.peak, held)


@pytest.fixture(scope="module")
def site() -> Site:
    backbone = load_backbone("vit:64x5/3", image_px=36, seed=3)
    task = Task(name="nevus", classes=("x", "y"), backbone=backbone.spec, rounds=1, epochs=1, seed=0)
    rows = examples(40, 2, 1)
    return Site(name="a", task=task, backbone=backbone, train=rows, tune=examples(8, 2, 2), unlabelled=rows)


@pytest.mark.parametrize("method", ["fedevprompt", "fedavg", "pep-fedpt"])
def test_the_told_memory_is_the_profilers(method, site, one_thread) -> None:
    """Told from batches of 4 and 8, for one of 16: within 5 % of what the allocator gave."""
    settings = RunSettings(method=method, data=("lesions:sites=2",), hyper={"head_norm": "none", "readout": "cls"})
    told = step_memory.step_memory(settings, site).of(16)
    with mock.patch.object(step_memory, "LiveBytes", Profiled):
        given = step_memory.peak_of(step_memory.with_batch(settings, 16).build_method(), site, 16)
    weights = sum(value.nbytes for value in site.backbone.state_dict().values())
    assert told == pytest.approx(given + weights, rel=0.05)


def test_the_maps_of_others_are_in_it(site, one_thread) -> None:
    """FedEvPrompt compares maps from round 2 on, and attention is then recorded block by block: more than without."""
    words = {"head_norm": "none", "readout": "cls"}
    with_maps, without = (
        step_memory.step_memory(
            RunSettings(method="fedevprompt", data=("lesions:sites=2",), hyper={**words, "kd_weight": weight}), site
        )
        for weight in (1e-6, 0.0)
    )
    assert with_maps.image > 1.05 * without.image


def test_the_largest_batch_is_a_power_of_two_that_fits() -> None:
    """By hand: of 1 GiB nine tenths are taken, 100 MiB are fixed, 1 MiB goes to each image: 821 images, so 512."""
    memory = StepMemory(fixed=100 * 2**20, image=2**20)
    assert memory.of(8) == 108 * 2**20
    assert memory.largest_batch(GIB, 10_000) == 512
    assert memory.largest_batch(GIB, 40) == 32  # no more than the smallest site has
    assert memory.largest_batch(100 * GIB, 10**6) == 4096
    assert memory.largest_batch(113 * 2**20, 40) == 1
    assert memory.largest_batch(112 * 2**20, 40) == 0


WORDS = ("--preset", "tiny", "--image-px", "36", "--device", "cuda", "--json")
FREE = "edgefl_trainer.engine.card.step_memory.free_bytes"


def test_a_fitted_batch_is_the_runs_batch(ward, tmp_path) -> None:
    """Recorded in `config.toml`, the same when the run goes on, and the same digest as that number given."""
    words = ("run", "local", "--data", ward, *WORDS)
    small = StepMemory(fixed=0, image=2**20)
    with pretended_card(), mock.patch.object(step_memory, "step_memory", lambda *asked: small):
        with mock.patch(FREE, lambda device: 5 * 2**20):
            begun = edgefl_train(*words, "--batch", "auto", "--out", tmp_path / "auto")
        (tmp_path / "auto" / "summary.json").unlink()  # as after a kill
        with mock.patch(FREE, lambda device: GIB):
            again = edgefl_train("run", "--resume", "--batch", "auto", "--out", tmp_path / "auto", "--json")
        given = edgefl_train(*words, "--batch", "4", "--out", tmp_path / "given")
    assert "memory: a step of 4 images takes about 4.0 MiB of the card" in begun.err
    config = tomllib.loads((tmp_path / "auto" / "config.toml").read_text())
    assert config["hyper"]["batch"] == 4
    digests = {json.loads(one.out)["state_sha256"] for one in (begun, again, given)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("words", "free", "sentence"),
    [
        (("local", "--batch", "auto"), 2**19, "a step of one image takes about 1.0 MiB, and the card has 0.5 MiB free"),
        (("random-init", "--batch", "auto"), GIB, "random-init learns in no batches: leave --batch out."),
        (("local", "--batch", "auto", "--device", "cpu"), GIB, "this run computes on the processor: give a number"),
    ],
)
def test_what_cannot_be_fitted_is_refused(words, free, sentence, ward, tmp_path) -> None:
    small = StepMemory(fixed=0, image=2**20)
    with (
        pretended_card(),
        mock.patch.object(step_memory, "step_memory", lambda *asked: small),
        mock.patch(FREE, lambda device: free),
    ):
        found = edgefl_train("run", "--data", ward, *WORDS, *words, "--out", tmp_path / "run")
    assert sentence in found.sentence()
    assert not (tmp_path / "run").exists()


def test_a_full_card_is_one_sentence(ward, tmp_path) -> None:
    def full(*given: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with mock.patch("edgefl_trainer.learning.evidential.evidential_loss", full):
        words = ("--preset", "tiny", "--image-px", "36", "--device", "cpu")
        found = edgefl_train("run", "local", "--data", ward, *words, "--out", tmp_path / "run")
    assert found.sentence() == (
        "the card's memory was full in local_round of local for east, whose state is empty: start again in another "
        "--out with a smaller --batch, or with --batch auto."
    )
