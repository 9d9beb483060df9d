"""Every kind of method behind a SuperLink with three SuperNodes on the loopback interface, with TLS and keys.

`test_federation` holds the same rule without starting Flower. The oracle of every digest is the
local engine, which never sees Flower (docs/design.md 4: same seed, same digest).
"""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")

from tests.trainer.conftest import make_asked
from tests.trainer.flower.test_page import Shell, digest, kill, page
from tests.trainer.flower.test_ray import LESIONS, ORGANS, run

pytestmark = [pytest.mark.slow, pytest.mark.long]
SEEN = ("fedevprompt", "fedavg", "pep-fedpt", "fedclf", "fedmae")


@pytest.fixture
def shell(tmp_path: Path):
    made = Shell(tmp_path)
    yield made
    made.close()


def test_behind_a_superlink(shell: Shell, tmp_path: Path) -> None:
    """One SuperLink for all six; the SuperNodes whose pictures are asked questions take the place of the others."""
    [setting, *_, certificates, superlink, supernodes, start] = page()
    for block in (setting, certificates, superlink, supernodes):
        shell.type(block)
    app = start[start.index("app=") :]
    for method in SEEN:
        classes = "" if method == "fedmae" else 'classes = ["BCC", "BKL", "MEL", "NV"]'
        settings(tmp_path, method, classes)
        said = shell.type(app.replace("/server", f"/server-{method}"))
        assert "finished: state_sha256" in said, said
        assert digest(tmp_path / f"server-{method}") == run(method, LESIONS, tmp_path / f"local-{method}")

    kill("flower-supernode", f":{shell.port}")
    data = f"vqa-rad:{make_asked(tmp_path / 'vqa_rad', ORGANS)}"
    names = "rad-abdomen rad-chest rad-head"
    both = [certificates[certificates.index("for site") :], superlink[superlink.index("for site") :], supernodes, app]
    keys, register, supernodes, app = (text.replace("site-1 site-2 site-3", names) for text in both)
    shell.type(keys + register)
    shell.type(
        supernodes.replace(LESIONS, data).replace('--node-config "site', '--node-config "words=\\"share\\" site')
    )
    settings(tmp_path, "pfl-vqa", f'data = ["{data}"]')
    shell.type(app.replace("/server", "/server-asked").replace("site-1,site-2,site-3", names.replace(" ", ",")))
    assert digest(tmp_path / "server-asked") == run("pfl-vqa", data, tmp_path / "local-asked")


def settings(folder: Path, method: str, more: str) -> None:
    """Write the server's file."""
    text = f'method = "{method}"\npreset = "tiny"\nrounds = 2\nimage_px = 36\n{more}\n'
    (folder / "federation.toml").write_text(text)
