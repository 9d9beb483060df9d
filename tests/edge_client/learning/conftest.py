"""A home, a table of labelled pictures, and a bundle that learns from them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgefl_client.home import Home
from edgefl_protocol.bundle import Bundle


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture(scope="session")
def labels(tmp_path_factory: pytest.TempPathFactory, school: SimpleNamespace) -> Path:
    """27 pictures of each of two classes: 20 are held back, 7 teach."""
    made: Path = school.table(tmp_path_factory.mktemp("pictures"))
    return made


@pytest.fixture(scope="session")
def bundle(school: SimpleNamespace) -> Bundle:
    made: Callable[..., Bundle] = school.learning_bundle
    return made()
