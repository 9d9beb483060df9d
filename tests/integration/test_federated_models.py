"""The six models in examples/models/federated: signed, small, and their page says what their cards say."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from edgefl_client.cli import cli as device_cli
from edgefl_protocol.bundle import Card, load_bundle
from edgefl_protocol.bundle.model_card import rule_tried
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.data.lesions import draw_lesion

FOLDER = Path(__file__).resolve().parents[2] / "examples/models/federated"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
CENTRES = ("bcn", "msk", "rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
MOST_BYTES_TOGETHER = 60_000_000


@pytest.fixture(scope="module")
def cards() -> dict[str, Card]:
    """Of each centre's model, verified under the key beside it."""
    signer = read_public_key(FOLDER / "signing.pub").public
    found = {}
    for name in CENTRES:
        bundle = load_bundle((FOLDER / f"{name}.edgefl").read_bytes(), [signer], 1_800_000_000_000)
        assert bundle.signers[0] in PAGE
        assert bundle.preprocess.taught == TaughtPictures(side=84, jpeg_quality=75)  # as the page says
        found[name] = bundle.card
    return found


def test_the_page_tells_the_cards_figures(cards: dict[str, Card]) -> None:
    for name, card in cards.items():
        site, rule, federation = card.metrics["site"], card.suspicion, card.metrics["federation"]
        assert isinstance(site, dict) and isinstance(federation, dict) and card.site == name and card.metrics["int8"]
        assert rule is not None and rule.sensitivity is not None and rule.specificity is not None
        reported = rule_tried(card)
        assert reported is not None and "suspicious_reported" in card.metrics
        low, high = site["balanced_accuracy_interval"]
        missed, asked = round((1 - rule.sensitivity) * rule.suspicious), round((1 - rule.specificity) * rule.benign)
        assert (
            f"| `{name}.edgefl` | {card.sites[name]:,} | {site['balanced_accuracy']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{site['n_test']:,} | {missed} of {rule.suspicious} | {asked} of {rule.benign} | "
            f"{reported.passed} of {reported.pictures:,} |"
        ) in PAGE
        assert f"mean of the six centres is {federation['mean_balanced_accuracy']:.3f}" in PAGE
        assert "CC BY-NC 4.0" in card.licence_note
        assert card.method == "finetune"


def test_they_are_small_and_under_their_own_licence() -> None:
    assert sum((FOLDER / f"{name}.edgefl").stat().st_size for name in CENTRES) <= MOST_BYTES_TOGETHER
    assert "federated/" in (FOLDER.parent / "LICENSE").read_text(encoding="utf-8")


def test_the_command_of_the_page_scores_a_photograph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(FOLDER.parents[1])
    Image.fromarray(draw_lesion("MEL", site=0, number=7, px=256)[0]).save("photo.jpg", quality=90)
    (command,) = re.findall(r"^\$ edgefl (score .*)$", PAGE, re.M)
    done = CliRunner().invoke(device_cli, [*command.split(), "--home", "home", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-4) and found["refer"] is not None
    assert list((tmp_path / "heatmaps").glob("photo-*.png"))
