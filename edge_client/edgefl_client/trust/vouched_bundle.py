"""A verified bundle in a process that goes on, and whether enough signers vouch for it now.

A revoked signer counts nowhere, also not for the bundle in use; nor does one whom the device's owner trusts no more
(docs/security.md 2.6). Another process says so: `edgefl trust remove`, or an `edgefl sync` that fetched the list of
revoked keys. So whoever works for long asks before each picture or step. It costs a look at four files. Where one has
changed since, the signatures are verified again. What cannot be read lets nothing go on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from edgefl_client.home import Home
from edgefl_client.trust import models
from edgefl_exchange.trust_records import record_files

if TYPE_CHECKING:
    from edgefl_protocol.bundle import Bundle

_T = TypeVar("_T")


@dataclass
class VouchedBundle:
    """A bundle that `models.open_model` verified; the first look verifies its signatures again, whatever came since."""

    bundle: "Bundle"  # as it was verified
    home: Home  # says whose bundles count
    extra_trust: Sequence[bytes]  # public keys of signers that are trusted in this process, beside those of the home
    _seen: list[tuple[int, ...]] = field(default_factory=list, init=False)  # the files at the last verification

    def check(self) -> None:
        """Refuse to go on with a bundle for which too few signers vouch now.

        Raises:
            BundleError: so it is; the sentence is that of whoever opens the bundle now.
            StorageError: what says whose bundles count cannot be read.
        """
        # The bundle in use is among them because a sync that brings one may have brought its signers too.
        files = (self.home.trust_file, self.home.current_file, *record_files(self.home.member))
        now = [file_state(file) for file in files]  # before they are read: what changes meanwhile is seen next time
        if now != self._seen:
            models.verify_again(self.home, self.bundle, self.extra_trust)
            self._seen = now

    def before_each(self, items: Iterable[_T]) -> Iterator[_T]:
        """Give the items one by one, each after a `check`."""
        for item in items:
            self.check()
            yield item

    def before_told(self, report: Callable[[_T], None]) -> Callable[[_T], None]:
        """Make a report of progress that is told after a `check`, so that the work ends where that refuses."""

        def told(facts: _T) -> None:
            self.check()
            report(facts)

        return told


def file_state(file: Path) -> tuple[int, ...]:
    """Tell states of a file apart: empty where it is missing, the system's error where it cannot be reached."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return ()
    except OSError as error:
        return (error.errno or 0,)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
