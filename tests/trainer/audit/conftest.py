"""Finished runs over drawn lesions, and audits of few pictures."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from tests.shared import Shared
from tests.trainer.conftest import run

from edgefl_trainer.audit import member_lines, payload_lines, pictures

METHODS = {
    "fedevprompt": ("maps",),
    "fedproto": ("prototypes", "features"),
    "fedavg": ("features", "weights"),
    "sgpt": ("prompts and weights",),
    "finetune": ("weights",),
}


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
