"""Finished runs over drawn lesions, and audits of few pictures."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from tests.shared import Shared
from tests.trainer.conftest import run

from edgefl_trainer.audit import member_lines, payload_lines, pictures
from edgefl_trainer.audit.line import MEMBERSHIP, AuditLine, NotAttacked
from edgefl_trainer.audit.result import AuditResult

METHODS = {
    "fedevprompt": ("maps",),
    "fedproto": ("prototypes", "features"),
    "fedavg": ("features", "weights"),
    "sgpt": ("prompts and weights",),
    "finetune": ("weights",),
    "fedclf": ("features",),  # more pictures are compared than its bank holds
}


def a_result(state: str, *sites: tuple[str, ...], kind: str = "model") -> AuditResult:
    """An audit with a line of membership for each group of sites, and of maps none; inconclusive."""
    lines = [
        AuditLine(
            kind=kind,
            attack=MEMBERSHIP,
            against="rows <b>",
            measure="loss",
            figure=0.625,
            interval=(0.5, 0.7),
            floor=0.51,
            floor_of="a model of others",
            control=0.75,
            control_of="a model that memorises",
            needs=0.8,
            target=0.55,
            pictures=236,
            sites=group,
            more={"TPR at 1 % FPR": 0.0, "its low": 0.0, "its high": 0.032},
        )
        for group in sites
    ]
    left_out = NotAttacked("maps", "reconstruction", "too few <i>")
    return AuditResult(
        method="fedevprompt",
        travels=("maps",),
        state_sha256=state,
        pictures=200,
        lines=tuple(lines),
        not_attacked=(left_out,),
    )


@pytest.fixture
def small() -> Iterator[None]:
    """Ten candidates, and few rows on either side: drawn lesions are dear."""
    with (
        mock.patch.object(pictures, "CANDIDATES", 10),
        mock.patch.object(payload_lines, "CANDIDATES", 10),
        mock.patch.object(member_lines, "LEAST_ROWS", 10),
        mock.patch.object(pictures, "LEAST_QUERIES", 5),
    ):
        yield


@pytest.fixture(scope="session")
def run_of(shared: Shared, cached: None) -> Callable[[str], Path]:
    """A finished run of a method over three sites of 60 drawn lesions each."""

    def made(method: str) -> Path:
        def make(root: Path) -> None:
            outcome = run(method, "lesions:sites=3,images=60,px=36", root / "run", "tiny")
            assert outcome.code == 0, outcome.err

        return shared.made(f"audited-{method}", make) / "run"

    return made
