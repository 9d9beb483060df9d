"""Devices in a live federation: real commands against a real coordinator, over TLS on the loopback interface.

Bundles are really exported, and learn otherwise than the federation does, whose settings hold. The oracle of the digest
is the local engine of the trainer over the devices' own learners (docs/design.md 4: same seed, same digest, whichever
engine). Each starts a coordinator and learns on three devices, so both are slow; they make the bundles that other slow
tests take, and begin early, so that no other process waits for these.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from PIL.PngImagePlugin import PngInfo

pytest.importorskip("torch")

from tests.export.learning_bundles import NUMBERED, LearningBundle, contrast_bundle, prompt_bundle
from tests.integration.live.device_federation import (
    DEVICES,
    EPOCHS,
    ROUNDS,
    SEED,
    Federation,
    assert_nowhere,
    edgefl,
    join,
    local_digest,
    secrets_of,
    serving,
    wait_for,
)
from tests.shared import Shared

from edgefl_coordinator import cli as coordinator_cli
from edgefl_coordinator.web.admin import run_operation
from edgefl_protocol.bundle import Bundle, load_bundle
from edgefl_protocol.bundle.fedclf_plan import FedCLFPlan
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan
from edgefl_trainer.engine.models import open_run

pytestmark = [pytest.mark.slow, pytest.mark.long]

OURS, THEIRS = NUMBERED, ("NV", "BCC", "MEL")  # the bundle numbers its classes otherwise than the task
NOW_MS = 1_790_000_000_000
BATCH, QUEUE, PHOTO_PX = 8, 24, 48  # the networks read 36
PATIENT = "Erika-Mustermann-1964"  # planted in every picture
COLOURS = {"MEL": (90, 60, 50), "NV": (180, 120, 90), "BCC": (210, 150, 130)}  # of skin, for the gate


def draw(folder: Path, seed: int, each: int, classes: tuple[str, ...]) -> Path:
    """A table of pictures in a folder: a colour of skin for each class, and noise."""
    rng, lines = np.random.default_rng(seed), ["image,label"]
    folder.mkdir()
    for label in classes:
        for number in range(each):
            colour = np.array(COLOURS[label]) + rng.normal(0, 5, 3)
            pixels = np.clip(colour + rng.normal(0, 10, (PHOTO_PX, PHOTO_PX, 3)), 0, 255).astype(np.uint8)
            exif, text = Image.Exif(), PngInfo()
            exif[0x010E] = PATIENT
            text.add_text("Patient", PATIENT)
            Image.fromarray(pixels).save(folder / f"{label}{number}.png", exif=exif, pnginfo=text)
            lines.append(f"{label}{number}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder / "labels.csv"


def backbone(made: LearningBundle) -> dict[str, Any]:
    facts = asdict(open_run(made.run).backbone.spec)
    return {**facts, "mean": list(facts["mean"]), "std": list(facts["std"])}


@pytest.fixture
def prompts(tmp_path: Path, shared: Shared) -> Federation:
    """FedEvPrompt; what others' maps teach is heavy enough to change every bit. The third device has three classes."""
    made = prompt_bundle(shared)
    tables = {
        name: draw(tmp_path / name, index, 27, OURS if index == 2 else OURS[:2]) for index, name in enumerate(DEVICES)
    }
    return Federation(
        bundle=made.file, signer=made.signer, method="fedevprompt", classes=THEIRS, backbone=backbone(made),
        kinds=("maps",), settings={"kd_weight": 0.05, "batch": BATCH, "lr_head": 0.01, "b_blocks": 1}, pictures=tables,
    )  # fmt: skip


@pytest.fixture
def encoder(tmp_path: Path, shared: Shared) -> Federation:
    """FedCLF on a small convolutional network; folders of pictures without labels."""
    made = contrast_bundle(shared)
    folders = {
        name: draw(tmp_path / name, index, BATCH + 4 * index, OURS[:2]).parent for index, name in enumerate(DEVICES)
    }
    return Federation(
        bundle=made.file, signer=made.signer, method="fedclf", classes=THEIRS, backbone=backbone(made),
        kinds=("features", "weights"), settings={"lr": 0.01, "batch": BATCH, "queue": QUEUE}, pictures=folders,
    )  # fmt: skip


def loaded(federation: Federation) -> Bundle:
    return load_bundle(federation.bundle.read_bytes(), [federation.signer], NOW_MS)


def learn_together(
    folder: Path, federation: Federation, phases: tuple[str, ...], steps: int
) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Every exchange by every device, the first stopped after each step of its first train round.

    Check 14: then no key, invite or planted name is in what the coordinator logged, keeps and serves.

    Returns:
        The digest that the coordinator tells, and what each `sync` told of its broadcast.
    """
    received: dict[str, list[dict[str, Any]]] = {name: [] for name in DEVICES}
    with serving(folder / "coordinator", federation.task) as home:
        run_operation(home, "publish", {"path": str(federation.bundle), "trust": [federation.signer.hex()]})
        devices = {name: folder / f"device-{index}" for index, name in enumerate(DEVICES)}
        invites = [join(home, device, name, federation) for name, device in devices.items()]
        for number, phase in enumerate(phases, start=1):
            wait_for(home, number, "open")
            for name, device in devices.items():
                naming = federation.naming(name) if number == 1 else ()
                stops = steps - 1 if name == DEVICES[0] and number == phases.index("train") + 1 else 0
                for _ in range(stops):
                    found = edgefl(device, "sync", *naming, "--threads", 1, "--minutes", 1e-9)
                    assert found["learning"]["state"] == "paused" and not found["sent"]
                found = edgefl(device, "sync", *naming, "--threads", 1)
                assert [one["outcome"] for one in found["sent"]] == ["accepted"], found
                assert (found["learning"]["state"], found["learning"]["round"]) == ("done", number)
                assert found["round"]["phase"] == phase
                received[name].append(found["broadcast"])
                again = edgefl(device, "sync", "--threads", 1)
                assert again["learning"]["state"] == "skipped" and not again["sent"]
        status = wait_for(home, len(phases), "done")
        told = CliRunner().invoke(coordinator_cli.main, ["status", "--home", str(home.root)]).stdout
        for name, device in devices.items():
            received[name].append(edgefl(device, "sync")["broadcast"])
    assert status["state_sha256"] in told
    assert all(one["error"] is None for every in received.values() for one in every)
    planted = [PATIENT.encode(), *(one.removeprefix("efl1-")[:80].encode() for one in invites)]
    kept = [home.root / "log", home.config, home.database, home.heads, *home.blobs.iterdir()]
    assert_nowhere([*planted, *secrets_of(home, devices.values())], kept)
    return status["state_sha256"], received


def test_prompts_learned_live_have_the_digest_of_the_local_engine(tmp_path: Path, prompts: Federation) -> None:
    """docs/design.md 4 and 5, FedEvPrompt: three devices, two rounds, one stopped after every step of its first."""
    found, received = learn_together(tmp_path, prompts, ("train",) * ROUNDS, steps=2 * EPOCHS)
    others = dict(zip(DEVICES, (10 + 15, 10 + 15, 10 + 10), strict=True))  # five maps of each of two or three classes
    assert {name: [one["maps"] for one in every] for name, every in received.items()} == {
        name: [0, count, count] for name, count in others.items()
    }
    bundle = loaded(prompts)
    plan = bundle.training
    assert isinstance(plan, FedEvPromptPlan) and (plan.batch, plan.kd_weight) == (32, 1e-6)  # others than the task's
    rates = {"prompts.b": 2.5e-4, "prompts.t": 5e-4, "head.weight": 0.01, "head.bias": 0.01}
    wanted = replace(plan, batch=BATCH, kd_weight=0.05, rates=rates, epochs=EPOCHS, seed=SEED)
    assert local_digest(tmp_path / "local", bundle, wanted, prompts) == found


def test_an_encoder_learned_live_has_the_digest_of_the_local_engine(tmp_path: Path, encoder: Federation) -> None:
    """docs/design.md 4 and 5, FedCLF: three devices with pictures without labels; a warm exchange and two rounds."""
    found, received = learn_together(tmp_path, encoder, ("warm", *("train",) * ROUNDS), steps=2 * EPOCHS)
    banks = dict(zip(DEVICES, (16, 24, 24), strict=True))  # of 16, 24 and 32 pictures, after the warm exchange
    assert {name: [one["features"] for one in every[:3]] for name, every in received.items()} == {
        name: [0, sum(banks.values()) - own, 2 * QUEUE] for name, own in banks.items()
    }
    bundle = loaded(encoder)
    plan = bundle.training
    assert isinstance(plan, FedCLFPlan) and (plan.batch, plan.queue, plan.lr) == (16, 40, 0.03)
    wanted = replace(plan, batch=BATCH, queue=QUEUE, lr=0.01, epochs=EPOCHS, seed=SEED)
    assert local_digest(tmp_path / "local", bundle, wanted, encoder) == found
