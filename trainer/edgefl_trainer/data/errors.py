"""The errors of this package: something is wrong with the data a person named, or with how it should be dealt.

EdgeflError
└── DataError               a file, column, row, class, site or SPEC that cannot be used as it stands
    ├── SpecError           a SPEC that cannot be had as it is written (code `setting`)
    ├── TaskError           a task that the data cannot be read for, or that is written wrongly (code `setting`)
    └── PartitionError      numbers that no partition of the data can have (code `setting`)
"""

from edgefl_protocol.errors import EdgeflError


class DataError(EdgeflError):
    """The data cannot be used; the message says what was found, what was allowed and what to do."""

    code = "data"


class SpecError(DataError):
    """What is written cannot be a data SPEC; nothing was read. The message says what is allowed."""

    code = "setting"


class TaskError(DataError):
    """What is written cannot be a task, or the data is of another one. The message says what is allowed."""

    code = "setting"


class PartitionError(DataError):
    """A partition that cannot be made with these numbers; the message says which one to change."""

    code = "setting"
