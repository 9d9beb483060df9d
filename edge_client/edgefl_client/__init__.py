"""The device: scores, explains and exchanges on onnxruntime, without any learning framework.

    >>> from edgefl_client import Scorer

`Scorer(bundle).score(image)` gives a `Score`, `Asker(bundle).ask(image, question)` a `PictureAnswer`. Names are loaded
when first used, so that importing this package, and with it the command line, costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl_client.scoring.asker import Asker
    from edgefl_client.scoring.network import ScoreError
    from edgefl_client.scoring.scorer import Scorer
    from edgefl_protocol.pictures.answer import PictureAnswer
    from edgefl_protocol.pictures.score import ModelInfo, Score

__all__ = ["Asker", "ModelInfo", "PictureAnswer", "Score", "ScoreError", "Scorer"]

_HOME = {
    "PictureAnswer": "edgefl_protocol.pictures.answer",
    "Asker": "edgefl_client.scoring.asker",
    "ModelInfo": "edgefl_protocol.pictures.score",
    "Score": "edgefl_protocol.pictures.score",
    "ScoreError": "edgefl_client.scoring.network",
    "Scorer": "edgefl_client.scoring.scorer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
