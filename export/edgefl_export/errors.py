"""Errors of the export stage.

EdgeflError                 (edgefl_protocol)
└── ExportError             the graph could not be made, or the run cannot be exported as asked
    └── GateError           graph and trainer differ by more than the gates allow: no bundle
"""

from edgefl_protocol.errors import EdgeflError


class ExportError(EdgeflError):
    """A model that cannot be exported."""

    code = "export"


class GateError(ExportError):
    """The exported graph does not score as the trainer does."""

    code = "gate"
