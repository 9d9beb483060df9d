"""A radiograph, and a bundle that answers questions about it."""

import numpy as np
import pytest
from tests.asking import SIGNER, ask_bundle
from tests.conftest import encoded, true_map


@pytest.fixture
def ward(tmp_path):
    """A radiograph, a bundle that answers questions, and one for pictures."""
    grey = np.random.default_rng(5).integers(0, 160, (60, 50, 1), np.uint8).repeat(3, axis=2)
    (tmp_path / "CANARY.png").write_bytes(encoded(grey))
    (tmp_path / "ask.edgefl").write_bytes(ask_bundle(unsure_above=1.3, shown=true_map("attention")))
    (tmp_path / "signing.pub").write_text(SIGNER.public.hex())
    return tmp_path


@pytest.fixture
def asked(run, ward):
    def call(question, *more, image=ward / "CANARY.png", model="ask.edgefl"):
        return run("ask", image, question, "--model", ward / model, "--trust", ward / "signing.pub", *more)

    return call
