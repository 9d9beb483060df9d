"""The trainer's own errors.

    EdgeflError                     (edgefl_protocol)
    ├── SettingError                an option, a hyper-parameter or a settings file that cannot be had as it stands
    ├── BackboneError               no such backbone, or one that cannot take these images (code `backbone`);
    │                               a file or hub that failed (code `backbone_unreadable`)
    ├── RunError                    a run directory that cannot be used as asked (code `run`), or is damaged (`damaged`)
    ├── MethodError                 a half of a method that breaks its contract (code `method`)
    ├── TrainingError               a number that is not finite, a site that cannot be trained on
    ├── BudgetError                 a release that would cost more than a site's privacy budget: exit status 3
    └── FederationRefused           a live federation, or what it is trusted by, is refused or refuses: exit status 3

Data SPECs raise `edgefl_trainer.data.errors.DataError`. The command line turns the codes into exit statuses.
"""

from edgefl_protocol.errors import EdgeflError


class SettingError(EdgeflError):
    """What was asked for cannot be had; nothing was begun."""

    code = "setting"


class BackboneError(EdgeflError):
    """A backbone that does not exist or does not fit."""

    code = "backbone"


class RunError(EdgeflError):
    """A run directory that cannot be read, resumed or written."""

    code = "run"


class BusyRunError(RunError):
    """A run directory in which another process works."""


class TrainingError(EdgeflError):
    """Training met something it cannot go on with."""

    code = "training"


class MethodError(EdgeflError):
    """A half of a method that failed, or returned or sent something else than its contract says."""

    code = "method"


class BudgetError(EdgeflError):
    """A release would cost more than the site's privacy budget; it was not made."""

    code = "privacy_budget"


class FederationRefused(EdgeflError):
    """A coordinator is not the one that is trusted, or refused this site in a signed answer."""

    code = "refused"
