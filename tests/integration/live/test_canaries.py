"""What is planted in pictures stays at a GPU site, too: `edgefl-train join` over TLS.

Source: docs/security.md check 36. What left is what the coordinator opened, and what it keeps.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.edge_client.sharing.test_canaries import MARK, forms, tagged, word
from tests.integration.live.coordinator import Live

from edgefl_coordinator.founding.task import task_of_method
from edgefl_coordinator.web import sealed_requests
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.live import Join, SiteOptions, join

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the server in a thread, when it is stopped
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def pictures(folder: Path, site: int) -> bytes:
    """Forty pictures of a site, half JPEG and half PNG, with their canaries; returns the bytes of all."""
    kept = b""
    for number in range(40):
        label = ("nevus", "other")[number % 2]
        path = folder / f"site-{site}" / label / f"{word('name', number)}.{'png' if number % 4 < 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(draw_lesion(("NV", "MEL")[number % 2], site=site, number=number, px=36)[0])
        icc, info = word("icc", number).encode() * 20, PngInfo()
        info.add_text("Patient", word("text", number))
        more = {"pnginfo": info} if path.suffix == ".png" else {"comment": word("comment", number).encode()}
        image.save(path, exif=tagged(number), icc_profile=icc, **more)
        kept += path.read_bytes()
    return kept


@pytest.mark.parametrize("method", ["fedevprompt", "fedavg"])
def test_nothing_planted_leaves_a_gpu_site(method: str, tmp_path: Path, caplog, monkeypatch) -> None:
    """Check 36: two sites of forty pictures, maps or weights: 0 bytes of a canary at the coordinator and in the log;
    the pictures themselves hold them, as plain text."""
    caplog.set_level(logging.DEBUG)
    said, opened = list[str](), list[bytes]()

    def opens(*given: Any) -> Any:
        call = real(*given)
        opened.append(call.opened.payload)
        return call

    real = sealed_requests._open
    monkeypatch.setattr(sealed_requests, "_open", opens)
    planted = b"".join(pictures(tmp_path / "pictures", site) for site in (1, 2))
    caplog.clear()  # Pillow tells of the tags that it wrote
    given = {"preset": "tiny", "assignments": [], "image_px": 36, "seed": 0}
    task = {"name": "nevus", "classes": ["nevus", "other"], "seed": 0, **task_of_method(method, "tiny", **given)[0]}
    live = Live(tmp_path / "coordinator", task, 1)

    def joined(name: str, invite: str | None = None) -> dict[str, object]:
        options = SiteOptions(data=(f"folder:{tmp_path / 'pictures'}",), site=name, device="cpu")
        folder, ca = tmp_path / name, live.ca if invite else None
        return join(Join(folder=folder, invite=invite, ca=ca, once=True, say=said.append, options=options))

    with live.serving():
        for name in ("site-1", "site-2"):
            found = joined(name, live.operate("invite", name=name, role="site", hours=1)["invite"])
            live.operate("approve", name=name, fingerprint=found["fingerprint"])
        for _ in range(3):
            live.move_on()
            for name in ("site-1", "site-2"):
                joined(name)
        events = [one["event"] for one in live.operate("log", from_ms=0, most=100)["shown"]]
        assert events.count("reply_accepted") >= 2 and max(map(len, opened)) > 1000
    kept = b"".join(path.read_bytes() for path in live.home.root.rglob("*") if path.is_file())
    live.coordinator.store.close()
    for form in forms(MARK):
        assert form not in kept and form not in b"".join(opened)
        assert form.decode("latin-1") not in caplog.text + "".join(said)
    assert MARK.encode() in planted
