"""Pictures of a page are left out where a test reads its words: drawing them takes longer than all else of a page."""

import base64
from typing import IO, Any

import pytest
from matplotlib.figure import Figure

# A PNG of one pixel.
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made but not drawn, unless a test asks for them "drawn". Those of a module's own fixtures are drawn."""

    def left_out(figure: Figure, file: IO[bytes], **_: Any) -> None:
        file.write(PIXEL)

    if getattr(request, "param", "left out") != "drawn":
        monkeypatch.setattr(Figure, "savefig", left_out)
