"""The one error of this package: something is wrong with the data a person named.

EdgeflError
└── DataError      a file, column, row, class, site or SPEC that cannot be used as it stands
"""

from edgefl_protocol.errors import EdgeflError


class DataError(EdgeflError):
    """The data cannot be used; the message says what was found, what was allowed and what to do."""

    code = "data"
