"""The trainer's own errors.

    EdgeflError                     (edgefl_protocol)
    ├── BackboneError               no such backbone, or one that cannot take these images
    ├── RunError                    a run directory that cannot be read, resumed or written
    └── TrainingError               a number that is not finite, a site that cannot be trained on

Data SPECs raise `edgefl_trainer.data.errors.DataError`.
"""

from edgefl_protocol.errors import EdgeflError


class BackboneError(EdgeflError):
    """A backbone that does not exist or does not fit."""

    code = "backbone"


class RunError(EdgeflError):
    """A run directory that cannot be read, resumed or written."""

    code = "run"


class TrainingError(EdgeflError):
    """Training met something it cannot go on with."""

    code = "training"
