"""docs/methods.md 10: what no paper says is a hyper-parameter, with the default of the decision table."""

import re
from pathlib import Path

import pytest
from tests.trainer.methods.test_conformance import value_of

from edgefl_trainer.engine.hyper_parameters import build, hyper_types, preset_of
from edgefl_trainer.methods import METHODS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "methods.md"

RECIPE = {"weight_decay": 1e-2, "lr_b": 2.5e-4, "lr_t": 5e-4, "lr_head": 5e-4, "batch": 32, "evidence": "softplus",
          "readout": "auto", "head_norm": "auto", "anneal_clock": "run", "anneal_epochs": 10, "prompt_init": "normal",
          "prompt_length": 0, "b_blocks": 3, "prior_floor": 1e-2, "loss": "evidential", "optimizer": "adamw",
          "prefix": "after"}  # fmt: skip
MAPS = {"rollout": "renormalise", "kd_metric": "bilinear", "kd_peers": "sum", "kd_weight": 1e-6, "maps_per_class": 5,
        "select": "vacuity", "sent_maps": "each", "rollout_from": 0, "kd_batch": "mean"}  # fmt: skip
TOKENS = {"lr": 0.1, "lr_decay": 0.998, "momentum": 0.9, "clip": 10, "batch": 50, "weight_decay": 0}
ANSWERS = {"lr": 1e-3, "lr_prompts": 1e-2, "batch": 32, "beta": 1e-4, "dropout": 0.1, "width": 128, "heads": 4,
           "question_blocks": 2, "fusion_blocks": 2, "prompt_length": 8, "prompt_site": "both", "encoder": "frozen",
           "picture": "seen"}  # fmt: skip
DEFAULTS = {
    "pfl-vqa": ANSWERS | {"alpha": 0.1, "exchange": "reliability", "use_shared": "loss"},
    "local": RECIPE,
    "fedevprompt": RECIPE | MAPS,
    "fedavg": RECIPE | MAPS | {"weighting": "samples", "share": "bt", "kd": False},
    "fedavgpers": RECIPE | {"weighting": "samples", "final_epochs": 0},
    "fedprox": RECIPE | {"mu": 0.01},
    "fedproto": RECIPE | {"proto_weight": 1, "weighting": "samples", "predict": "head", "prototypes": "after"},
    "feddistill": RECIPE | {"distill_weight": 1, "exclude_own": False},
    "head": TOKENS,
    "fedvpt": TOKENS | {"n": 1},
    "fedvpt-deep": TOKENS | {"n": 1, "last_block": "L-2"},
    "fedpr": TOKENS | {"n": 10, "ratio": 0, "fro_norm": False},
    "sgpt": {"groups": 20, "key_momentum": 0.5, "prompt_momentum": 0.5, "lr": 0.01, "weight_decay": 1e-5, "batch": 40},
    "pfedpg": {"n": 10, "residual": True, "server_lr": 1e-3, "lr": 0.25, "weight_decay": 1e-3, "batch": 64},
    "p-pt": TOKENS | {"n": 1, "head": "averaged"},
    "pep-fedpt": TOKENS
    | {
        "slot": "replace",
        "rho": 0.5,
        "tau": 0.05,
        "n_s": 1,
        "period": 10,
        "prior": True,
        "dp_epsilon": 0,
        "dp_clip_l1": 0,
    },
}
ALTERNATIVES = {  # the table's other column, method by method
    "fedevprompt": {
        "optimizer": ("sgd", "adam"), "evidence": ("exp", "relu"), "readout": ("cls", "mean"),
        "head_norm": ("standardise", "none"), "anneal_clock": ("round",), "prefix": ("before",), "rollout": ("sink",),
        "kd_metric": ("nearest",), "kd_peers": ("mean5",), "rollout_from": (1,), "kd_batch": ("sum",),
        "select": ("random", "correct"), "sent_maps": ("mean",), "prior_floor": (0.0,),
    },
    "fedavg": {"weighting": ("uniform",)},
    "fedavgpers": {"final_epochs": (3,)},
    "pfl-vqa": {
        "prompt_site": ("image", "text"), "encoder": ("learned",), "picture": ("hidden",), "use_shared": ("concat",),
        "exchange": ("accuracy", "similarity", "uniform"), "alpha": (0.0,),
    },
    "fedprox": {"mu": (0.001, 0.1, 0.5, 1.0)},
    "fedproto": {"weighting": ("uniform",), "prototypes": ("during",)},
    "feddistill": {"exclude_own": (True,)},
    "pep-fedpt": {"ccmp_blocks": ((4, 5, 6),), "slot": ("append",), "dp_epsilon": (0.2,)},
    "fedpr": {"ratio": (0.8,), "fro_norm": (True,)},
    "pfedpg": {"residual": (False,)},
    "p-pt": {"head": ("local",)},
}  # fmt: skip
EVIDENTIAL = {"evidence": "relu", "prompt_init": "uniform", "head_norm": "none", "augment": "none"}
TOKEN = {"weighting": "uniform", "head_norm": "none", "readout": "cls"}
PAPER = {
    "fedevprompt": EVIDENTIAL,
    "local": EVIDENTIAL,
    "fedavg": EVIDENTIAL,
    "pep-fedpt": TOKEN,
    "fedvpt": TOKEN,
    "sgpt": TOKEN,
}


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_defaults_are_those_of_the_decision_table(name):
    method = build(METHODS[name], {})
    assert {key: value_of(method, key) for key in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("name", sorted(ALTERNATIVES))
def test_the_other_column_of_the_decision_table_can_be_set(name):
    for key, values in ALTERNATIVES[name].items():
        for value in values:
            assert value_of(build(METHODS[name], {key: value}), key) == value != value_of(build(METHODS[name], {}), key)


@pytest.mark.parametrize("name", sorted(PAPER))
def test_the_preset_paper_differs_where_the_table_says(name):
    assert PAPER[name].items() <= preset_of(name, "paper")["hyper"].items()


def test_blocks_of_twelve_are_those_of_the_table():
    """PEP-FedPT 5, 6, 7; SGPT shared 0 to 3, groups 4 to 6; FedVPT-Deep eleven; all counted from 0."""
    assert build(METHODS["pep-fedpt"], {}).insert(12).blocks == (5, 6, 7)
    sgpt = build(METHODS["sgpt"], {}).insert(12)
    assert (sgpt.shared_blocks, sgpt.group_blocks) == ((0, 1, 2, 3), (4, 5, 6))
    assert build(METHODS["fedvpt-deep"], {}).insert(12).blocks == tuple(range(11))


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_every_hyper_parameter_stands_on_the_page(name):
    text = PAGE.read_text(encoding="utf-8")
    missing = [key for key in hyper_types(METHODS[name]) if not re.search(rf"`{key}\b", text)]
    assert missing == []
