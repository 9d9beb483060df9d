"""Errors of the export stage.

EdgeflError                 (edgefl_protocol)
└── ExportError             the graph could not be made, or the run cannot be exported as asked
    └── GateError           graph and trainer differ by more than the gates allow: no bundle
"""

from collections.abc import Iterator
from contextlib import contextmanager

from edgefl_protocol.errors import EdgeflError


class ExportError(EdgeflError):
    """A model that cannot be exported."""

    code = "export"


class GateError(ExportError):
    """The exported graph does not score as the trainer does."""

    code = "gate"


@contextmanager
def refused_settings() -> Iterator[None]:
    """Turn a setting that the record of a training step cannot hold into a sentence."""
    try:
        yield
    except ValueError as error:
        raise ExportError(
            f"a device cannot learn as the run did: {error}; leave --with-training out, or export a run that "
            "devices can learn"
        ) from error
