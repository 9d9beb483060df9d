"""How a known failure ends a command: one sentence and an exit code.

1: it failed and may work another time or with other input. 3: it was refused (signature, trust, certificate, policy),
and trying again changes nothing. Usage errors end with 2 (docs/design.md, section 5). Any other exception is a defect
and shows its traceback.
"""

from edgefl_client.sharing.policy import PolicyError
from edgefl_exchange.enrolment import EnrolmentError
from edgefl_exchange.errors import REFUSED_FOR_GOOD, NotEnrolled, SignedRefusal, TlsRefused
from edgefl_protocol.errors import BundleError, EdgeflError, EnvelopeError, InviteError, KeyMaterialError, RecordError

FAILED, USAGE, REFUSED = 1, 2, 3

_POLICY = REFUSED_FOR_GOOD | {"replaced_key", "pending", "small_cohort"}  # a device does not wait for these
_REFUSALS = (BundleError, EnvelopeError, PolicyError, RecordError, TlsRefused)
_MIXED = (SignedRefusal, NotEnrolled, EnrolmentError, InviteError, KeyMaterialError)  # refused only for some codes
_RUNTIME_CODES = frozenset({"graph_run", "graph_load", "too_large"})
# A bundle that another command is for, and `--weights personal` where none are kept: other words are to be typed.
_USAGE_CODES = frozenset({"other_kind", "no_personal"})


def exit_code(error: EdgeflError) -> int:
    """Return the exit status of a command that ends with this error."""
    if error.code in _USAGE_CODES:
        return USAGE
    if isinstance(error, _REFUSALS):
        return FAILED if error.code in _RUNTIME_CODES else REFUSED
    return REFUSED if isinstance(error, _MIXED) and error.code in _POLICY else FAILED
