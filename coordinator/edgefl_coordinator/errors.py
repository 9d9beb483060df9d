"""Errors of the coordinator.

EdgeflError (edgefl_protocol)
├── RefusedError      a request after its signature was checked: answered sealed and typed; code of `REFUSAL_STATUS`
└── OperatorError       an operator's command or setting is wrong (`usage`: exit 2); the sentence says what to do
    └── NotAllowedError the command is refused by policy or trust (exit 3)
"""

from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages.requests import Refusal

IN_USE = "in_use"  # code of the OperatorError where another process has the store open
STOPPED = "stopped"  # code of the OperatorError of a job that ended with the server: it did not fail
USAGE = "usage"  # code of the OperatorError where what was asked for cannot be had: nothing was begun


class RefusedError(EdgeflError):
    """A member's request is refused; `refusal` is what the sealed reply holds."""

    def __init__(self, code: str, message: str, highest: int | None = None) -> None:
        super().__init__(message, code)
        self.refusal = Refusal(code=code, message=message, highest=highest)


class OperatorError(EdgeflError):
    """An operator's command or setting cannot be carried out."""

    code = "operator"


class NotAllowedError(OperatorError):
    """An operator's command is refused by policy or trust."""

    code = "policy"
