"""Checks of `edgefl doctor` on what lies in the home folder: modes, space, signers, learned values, policy, outbox.

None needs a key or a network, and none writes.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgefl_client.doctor.findings import DAY_MS, SOON_DAYS, Finding
from edgefl_client.home import Home
from edgefl_client.sharing.policy import load_policy
from edgefl_client.sharing.spending import read_spent
from edgefl_client.sharing.waiting_items import list_waiting
from edgefl_client.trust.signers import signers_in_force
from edgefl_exchange.errors import NotEnrolled
from edgefl_exchange.membership import load_membership
from edgefl_exchange.trust_records import load_revoked
from edgefl_protocol.sentences import counted

_MIB = 2**20
LITTLE_MIB, TOO_LITTLE_MIB = 1024, 64  # free on the disk
UNKNOWN_KEYS = "the coordinator did not know this device's keys when it was last asked, so it takes none"
_BY_HAND = "compare the signer's key over another channel, then: edgefl trust add PUB"
_ASK_FOR_ROOT = (
    "ask the operator to publish a root set, which says whose bundles count, then run edgefl sync; by hand: "
    "edgefl trust add PUB"
)
OLD_ITEM_DAYS, OLDEST_ITEM_DAYS = 7, 30  # in the outbox: told; dropped


def check_home(home: Home) -> Iterator[Finding]:
    """Check that everything in the home is its owner's alone, and that this user can write it."""
    if not home.root.exists():
        yield Finding(check="home", state="ok", found=f"{home.root} does not exist yet; it is made when it is needed")
        return
    if closed := next(_unwritable(home.root), None):
        mine = closed.lstat().st_uid == os.geteuid()
        yield Finding(
            check="home", state="fail", found=f"this user cannot read and write {closed}",
            advice=f"chmod -R u+rwX {home.root}" if mine else f"chown -R {os.geteuid()} {home.root}, as root",
        )  # fmt: skip
        return
    paths = [home.root, *home.root.rglob("*")]
    opened = [path for path in paths if not path.is_symlink() and path.stat().st_mode & 0o077]
    if opened:
        yield Finding(
            check="home", state="fail",
            found=f"others can read or change {counted(len(opened), 'file or folder', 'files and folders')} of it, "
                  f"such as {opened[0]}",
            advice=f"chmod -R go-rwx {home.root}",
        )  # fmt: skip
        return
    yield Finding(check="home", state="ok", found=f"only its owner can read {home.root}, and this user can write it")


def _unwritable(folder: Path) -> Iterator[Path]:
    """Name the folders of a home, and the files that are opened there for writing, that this user cannot use.

    Any other file is replaced by a new one.
    """
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _unwritable(path)
        elif path.suffix in (".sqlite3", ".lock") and not os.access(path, os.R_OK | os.W_OK):
            yield path


def check_disk(home: Home) -> Iterator[Finding]:
    """Check that the disk has room to work."""
    place = next(path for path in (home.root.absolute(), *home.root.absolute().parents) if path.exists())
    free_mib = shutil.disk_usage(place).free // _MIB
    state = "fail" if free_mib < TOO_LITTLE_MIB else "warn" if free_mib < LITTLE_MIB else "ok"
    advice = (
        None
        if state == "ok"
        else ("free some space; when the disk is full, new work is refused, and what is already kept is safe")
    )
    yield Finding(check="disk", state=state, found=f"{free_mib:,} MiB free", advice=advice)


def check_signers(home: Home, now_ms: int) -> Iterator[Finding]:
    """Check that a signer of bundles is trusted, and that the list of revoked keys is fresh."""
    signers = signers_in_force(home)
    if not signers.keys:
        yield Finding(
            check="signers", state="warn", found="no signer of bundles is trusted, so no bundle can be used",
            advice=_ASK_FOR_ROOT if (home.member / "membership.json").exists() else _BY_HAND,
        )  # fmt: skip
        return
    listed = load_revoked(home.member)
    said = f"{counted(len(signers.keys), 'trusted signer')}"
    if listed is not None and listed.expires_ms < now_ms:
        yield Finding(
            check="signers", state="warn", found=f"{said}; the list of revoked keys is older than a day",
            advice="fetch a fresh list, without which no new bundle is accepted: edgefl sync",
        )  # fmt: skip
        return
    yield Finding(check="signers", state="ok", found=said)


def check_personal(home: Home) -> Iterator[Finding]:
    """Check that values learned here can be read, and belong to the bundle in use."""
    if not home.learning.exists():
        yield Finding(check="personal", state="ok", found="nothing was learned on this device")
        return
    from edgefl_client.scoring.learning_verdict_words import verdict_line
    from edgefl_client.scoring.personal import kept_personal
    from edgefl_client.scoring.untaught import untaught_in_use
    from edgefl_client.trust import models

    state = kept_personal(home)
    if state is None:
        yield Finding(check="personal", state="ok", found="no values learned here have passed their gate")
    elif state.verdict is None:
        yield Finding(
            check="personal", state="warn",
            found="the values learned here passed an older gate, of fewer conditions, so none are used",
            advice="learn a round, which is judged anew: edgefl train; or forget them: edgefl advanced personal remove",
        )  # fmt: skip
    elif home.current_file.exists() and models.current_file(home).stem == state.bundle_sha256:
        never = untaught_in_use(home, state.seen)
        said = f"the values learned here score, those of round {state.round}; they passed their gate"
        if never["never_suspicious"]:
            said += f". {never['never_predicts'].removesuffix('.')}"
        yield Finding(
            check="personal", state="warn" if never["never_suspicious"] else "ok", found=said,
            advice=None if not never["never_suspicious"] else "label pictures of them and learn again with edgefl "
            "train; or go back to the bundle's values: edgefl advanced personal remove",
            detail=verdict_line(state.verdict.to_json()),
        )  # fmt: skip
    else:
        yield Finding(
            check="personal", state="warn", found="the values learned here belong to another bundle, so none are used",
            advice="learn anew with edgefl train, or forget them: edgefl advanced personal remove",
        )  # fmt: skip


def check_policy(home: Home, now_ms: int) -> Iterator[Finding]:
    """Check that the owner's policy can be read, and warn of a consent that ends soon."""
    policy = load_policy(home)
    spent = read_spent(home, now_ms)
    used = f"in 24 hours {spent.rounds} of {policy.limits.rounds_per_day} rounds, {spent.bytes:,} bytes"
    if not policy.allowed:
        yield Finding(check="policy", state="ok", found="nothing may leave this device")
        return
    ended = [kind for kind in policy.allowed if not policy.holds(kind, now_ms)]
    ending = [kind for kind in policy.allowed if not policy.holds(kind, now_ms + SOON_DAYS * DAY_MS)]
    said = f"may leave: {', '.join(sorted(policy.allowed))}; {used}"
    if ending:
        over = f"; the consent ended for {', '.join(ended)}" if ended else f"; it ends soon for {', '.join(ending)}"
        yield Finding(
            check="policy", state="warn", found=said + over, advice=f"renew it: edgefl policy allow {' '.join(ending)}"
        )
        return
    yield Finding(check="policy", state="ok", found=said)


def _nobody_takes(home: Home) -> str:
    """Say why nothing of the outbox can be sent; "" where it can."""
    try:
        known = not load_membership(home.member).unknown_ms
    except NotEnrolled:
        return "the membership that they are for is gone"
    return "" if known else UNKNOWN_KEYS


def check_outbox(home: Home, now_ms: int) -> Iterator[Finding]:
    """Check that nothing in the outbox is about to be dropped."""
    items = list_waiting(home, now_ms)
    if not items:
        yield Finding(check="outbox", state="ok", found="nothing waits")
        return
    oldest_days = max(one.age_s for one in items) / 86_400
    said = (
        f"{counted(len(items), 'item waits', 'items wait')}, {sum(one.bytes for one in items):,} bytes; the "
        f"oldest is {oldest_days:.1f} days old"
    )
    if lost := _nobody_takes(home):
        yield Finding(
            check="outbox", state="warn", found=f"{said}; {lost}",
            advice=f"edgefl advanced outbox drop ID drops one now, edgefl sync after {OLDEST_ITEM_DAYS} days, and "
                   "enrolling anew all of them",
        )  # fmt: skip
        return
    if oldest_days > OLD_ITEM_DAYS:
        yield Finding(
            check="outbox", state="warn", found=f"{said} and is dropped after {OLDEST_ITEM_DAYS} days",
            advice="edgefl sync sends what is due; edgefl advanced outbox lists it",
        )  # fmt: skip
        return
    yield Finding(check="outbox", state="ok", found=said)
