"""Exchange with a coordinator: keys on the disk, sealed questions and signed answers, an outbox that survives crashes.

Public and free of any learning framework, so that a device and a GPU server join a federation with the same code.
"""

from edgefl_exchange.caller import Caller
from edgefl_exchange.coordinator_keys import CoordinatorView
from edgefl_exchange.delivery import Delivery
from edgefl_exchange.enrolment import EnrolmentError, enrol, trust_certificate
from edgefl_exchange.errors import ExchangeError, NotEnrolled, OutboxError, Refused, TlsRefused, Unavailable
from edgefl_exchange.identity import Identity, create_identity
from edgefl_exchange.member import Member
from edgefl_exchange.membership import Membership, ca_file, load_membership, load_task, read_ca
from edgefl_exchange.outbox import Bounds, Outbox, WorkItem
from edgefl_exchange.transport import Answer, Request, Transport

__all__ = [
    "Answer",
    "Bounds",
    "Caller",
    "CoordinatorView",
    "Delivery",
    "EnrolmentError",
    "ExchangeError",
    "Identity",
    "Member",
    "Membership",
    "NotEnrolled",
    "Outbox",
    "OutboxError",
    "Refused",
    "Request",
    "TlsRefused",
    "Transport",
    "Unavailable",
    "WorkItem",
    "ca_file",
    "create_identity",
    "enrol",
    "load_membership",
    "load_task",
    "read_ca",
    "trust_certificate",
]
