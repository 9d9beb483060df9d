"""Verified bundles, the command line, files to score, and a device that is enrolled at a coordinator in memory."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from tests.exchange.conftest import net, no_waiting

from edgefl_client.cli import main
from edgefl_client.sharing import enrolled_device
from edgefl_protocol.bundle import Bundle, load_bundle
from edgefl_protocol.records.invite import encode_invite

__all__ = ["net", "no_waiting"]  # fixtures of the exchange's tests


@pytest.fixture(scope="session")
def plain_bundle(lab: SimpleNamespace) -> Bundle:
    return load_bundle(lab.bundle_bytes(), [lab.SIGNER.public], lab.NOW_MS)


@pytest.fixture
def make_bundle(lab: SimpleNamespace) -> Callable[..., Bundle]:
    return lambda **options: load_bundle(lab.bundle_bytes(**options), [lab.SIGNER.public], lab.NOW_MS)


@pytest.fixture
def live(net):
    return net.FakeCoordinator(now_ms=time.time_ns() // 1_000_000)


@pytest.fixture
def run(capsys, monkeypatch, tmp_path, live):
    """The command line, in a folder of its own; every address leads to the coordinator in memory."""
    home = tmp_path / "home"
    monkeypatch.setenv("EDGEFL_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(enrolled_device, "HttpsTransport", lambda *_: live)

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return left.value.code, out, err

    call.home = home
    return call


@pytest.fixture
def after(monkeypatch):
    """Does something once, right after so many calls of a function."""

    def call(calls, where, name, then):
        real, made = getattr(where, name), []

        def counted(*given, **named):
            result = real(*given, **named)
            made.append(given)
            if len(made) == calls:
                then()
            return result

        monkeypatch.setattr(where, name, counted)

    return call


@pytest.fixture
def invite(live):
    return encode_invite(live.invite(), live.now_ms)


@pytest.fixture
def device(run, live, invite, lab, labelled):
    """Enrolled, approved, trusting the signer, bundle published, maps may leave, six labelled pictures."""
    assert run("enrol", invite)[0] == 0
    assert run("policy", "allow", "maps")[0] == 0
    live.approve()
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    assert run("trust", "add", lab.SIGNER.public.hex())[0] == 0
    return labelled


@pytest.fixture
def labelled(lab, tmp_path):
    """Six labelled pictures of skin."""
    rows = ["image,label"]
    for number in range(6):
        pixels = lab.photo(50, 40, (180 + number, 120, 90))
        (tmp_path / f"{number}.png").write_bytes(lab.encoded(pixels))
        rows.append(f"{number}.png,{lab.CLASSES[number % 2]}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


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
