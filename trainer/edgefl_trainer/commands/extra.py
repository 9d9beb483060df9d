"""Commands that need the extra `edgefl-derm[trainer]` say so in one sentence where it is missing."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from edgefl_protocol.distribution import needs_extra
from edgefl_protocol.errors import EdgeflError


def needs_trainer(command: Callable[..., Any]) -> Callable[..., Any]:
    """Say in one sentence that the extra is missing, instead of failing at an import."""

    def checked(*args: Any, **options: Any) -> Any:
        if find_spec("torch") is None or find_spec("timm") is None:
            raise EdgeflError(f"this command needs {needs_extra('trainer')}.", "setting")
        return command(*args, **options)

    checked.__name__, checked.__doc__ = command.__name__, command.__doc__
    return checked


def check_engine(engine: str) -> None:
    """Refuse, by an `EdgeflError`, an engine whose extra is not installed."""
    if engine == "flower" and (find_spec("flwr") is None or find_spec("ray") is None):
        raise EdgeflError(f"--engine flower needs {needs_extra('flower')}.", "setting")
