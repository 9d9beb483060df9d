"""Verified bundles, the command line, and files to score."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from edgefl_client.cli import main
from edgefl_protocol.bundle import Bundle, load_bundle


@pytest.fixture(scope="session")
def plain_bundle(lab: SimpleNamespace) -> Bundle:
    return load_bundle(lab.bundle_bytes(), [lab.SIGNER.public], lab.NOW_MS)


@pytest.fixture
def make_bundle(lab: SimpleNamespace) -> Callable[..., Bundle]:
    return lambda **options: load_bundle(lab.bundle_bytes(**options), [lab.SIGNER.public], lab.NOW_MS)


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EDGEFL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return left.value.code, out, err

    return call


@pytest.fixture
def files(lab, tmp_path):
    """A bundle, its signer's key, good and bad pictures."""
    (tmp_path / "model.edgefl").write_bytes(lab.bundle_bytes())
    (tmp_path / "signing.pub").write_text(lab.SIGNER.public.hex())
    (tmp_path / "good.png").write_bytes(lab.encoded(lab.photo(60, 40)))
    (tmp_path / "photo.JPG").write_bytes(lab.encoded(lab.photo(90, 90, (200, 110, 80)), "JPEG"))
    (tmp_path / "text.jpg").write_bytes(b"this is no picture")
    (tmp_path / "cut.png").write_bytes(lab.encoded(lab.photo(60, 40))[:60])
    return tmp_path
