"""What people give: the words of --run-config, of --node-config, and the server's file (docs/guides/flower.md).

What is wrong or has no effect is one sentence, before anything begins.
"""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")

from edgefl_trainer.errors import SettingError
from edgefl_trainer.flower.away import seat_of
from edgefl_trainer.flower.federation import Arrangement, settings_of_server
from edgefl_trainer.live import SiteOptions

PLAN = {"config": "a", "out": "b", "sites": "x y"}
SEAT = {"site": "x", "data": "folder:a folder:b", "out": "c"}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"sites": ""}, "lacks sites"),
        ({"quorum": 3}, "quorum is 3 of the sites x, y"),
        ({"sites": "x, x"}, "name each once"),
        ({"quorum": "two"}, r"quorum is 'two'; allowed: a whole number\."),
        ({"quorum": -1}, r"quorum is -1; allowed: 0 \(all\) or more"),
        ({"deadline-seconds": -5}, "deadline-seconds is -5; allowed: 0 or more"),
        ({"wait-seconds": "soon"}, "wait-seconds is 'soon'; allowed: a number"),
    ],
)
def test_a_plan_that_cannot_be(config, sentence) -> None:
    with pytest.raises(SettingError, match=sentence):
        Arrangement.of({**PLAN, **config})


def test_a_number_may_be_quoted() -> None:
    plan = Arrangement.of({**PLAN, "quorum": "1", "deadline-seconds": "30"})
    assert (plan.quorum, plan.deadline_s) == (1, 30)


def test_a_plan_without_numbers_waits_a_minute_and_wants_all() -> None:
    plan = Arrangement.of({**PLAN, "sites": "y,x"})
    assert (plan.sites, plan.quorum, plan.deadline_s, plan.wait_s) == (("x", "y"), 2, None, 60)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"out": ""}, "lacks out: give site=NAME"),
        ({"images_per_site": 3}, "has 'images_per_site'; did you mean images-per-site"),
        ({"images-per-site": "many"}, "images-per-site of --node-config is 'many'; allowed: a whole number"),
        ({"images-per-site": -4}, r"images-per-site of --node-config is '-4'; allowed: 0 \(all\) or more"),
        ({"privacy-budget": -1}, "privacy-budget of --node-config is '-1'; allowed: above 0; leave it out"),
        ({"privacy-budget": 0}, "privacy-budget of --node-config is '0'; allowed: above 0; leave it out"),
        ({"device": "gpu"}, "device of --node-config is 'gpu'; allowed: auto, cpu, cuda"),
    ],
)
def test_a_seat_that_cannot_be(config, sentence) -> None:
    with pytest.raises(SettingError, match=sentence):
        seat_of({**SEAT, **config})


def test_a_seat_has_what_join_has() -> None:
    """Numbers come as numbers or as texts, as they were quoted."""
    words = {"classes": "BCC,NV", "images-per-site": "40", "privacy-budget": 3, "unlabelled": "site", "words": "share"}
    assert seat_of({**SEAT, **words}).options == SiteOptions(
        site="x", data=("folder:a", "folder:b"), classes=("BCC", "NV"), images_per_site=40, privacy_budget=3.0,
        unlabelled="site",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "names no method"),
        ('method = "fedavg"\nround = 3', "did you mean rounds"),
        ('method = "fedavg"\nprivacy_budget = 2.0', "each SuperNode gives privacy-budget in its --node-config"),
        ('method = "fedavg"\ndevice = "cuda"', "each SuperNode gives device in its --node-config"),
        ('method = "fedavg"\nworkers = 2', "leave it out"),
        ('method = "fedavg"\nimages_per_site = 40', "each SuperNode gives images-per-site in its --node-config"),
        (
            'method = "fedavg"\ncolour = "shades_of_grey_6"',
            "has colour = shades_of_grey_6, and the server has no pictures: leave",
        ),
        ('method = "finetune"\nselect = "pooled"', "has select = pooled, and the server has no pictures: leave it out"),
    ],
)
def test_a_file_of_the_server_that_cannot_be(line, sentence, tmp_path) -> None:
    (tmp_path / "federation.toml").write_text(line)
    with pytest.raises(SettingError, match=sentence):
        settings_of_server(tmp_path / "federation.toml")


def test_a_federation_keeps_its_last_round(tmp_path) -> None:
    """decisions/0064: nobody sees the tune rows of all sites, whatever fine-tuning does on one machine."""
    (tmp_path / "federation.toml").write_text('method = "finetune"\npreset = "tiny"\nselect = "last"')
    assert settings_of_server(tmp_path / "federation.toml").select == "last"
    (tmp_path / "federation.toml").write_text('method = "finetune"\npreset = "tiny"')
    assert settings_of_server(tmp_path / "federation.toml").select == "last"
