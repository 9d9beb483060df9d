"""A site's clock that is ahead, and its invite. Source: docs/security.md 2.4 (signed time) and 2.5 (enrolment)."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.exchange.in_memory import HOUR_MS, FakeCoordinator

from edgefl_protocol.records.invite import encode_invite
from edgefl_trainer.errors import FederationRefused
from edgefl_trainer.live import site_membership
from edgefl_trainer.live.site_membership import SiteMembership


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> FakeCoordinator:
    """A coordinator by whose clock it is 30 hours earlier than by this machine's."""
    coordinator = FakeCoordinator(now_ms=time.time_ns() // 1_000_000 - 30 * HOUR_MS)
    monkeypatch.setattr(site_membership, "HttpsTransport", lambda *_: coordinator)
    return coordinator


def given(coordinator: FakeCoordinator, hours: int) -> str:
    """An invite for a site that expires in so many hours, by the coordinator's clock."""
    now_ms = coordinator.now_ms
    invite = replace(coordinator.invite("site-1"), role="site", expires_ms=now_ms + hours * HOUR_MS)
    return encode_invite(invite, now_ms + min(0, hours - 1) * HOUR_MS)


def test_a_clock_that_is_ahead_refuses_no_invite(behind: FakeCoordinator, tmp_path: Path) -> None:
    """Up to 48 hours are corrected by signed time, by which the invite is judged."""
    found = SiteMembership(tmp_path).enrolled(given(behind, hours=24), None, None)
    assert (found.name, found.state) == ("site-1", "pending")


@pytest.mark.parametrize(("hours", "code"), [(-1, "expired_invite"), (-20, "expired")])
def test_an_invite_that_expired_by_signed_time_is_refused_for_good(
    hours: int, code: str, behind: FakeCoordinator, tmp_path: Path
) -> None:
    """No token leaves; what no correction could make valid is refused before anybody is asked."""
    with pytest.raises(FederationRefused, match="the invite has expired; ask ") as refused:
        SiteMembership(tmp_path).enrolled(given(behind, hours=hours), None, None)
    assert refused.value.code == code and not behind.members
    assert bool(behind.requests) is (code == "expired_invite")
