"""A site's clock that is ahead, its invite, and its way to the coordinator.

Source: docs/security.md 2.4 (signed time) and 2.5 (enrolment).
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.exchange.in_memory import HOUR_MS, FakeCoordinator
from tests.exchange.tls_server import certificate

from edgefl_exchange.delivery import Delivery
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import Refusal
from edgefl_protocol.records.invite import encode_invite
from edgefl_trainer.errors import FederationRefused, RunError
from edgefl_trainer.live import site_membership
from edgefl_trainer.live.site_membership import Reply, SiteMembership


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


@pytest.fixture
def ways(behind: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path | None, str | None]]:
    """Certificate and proxy of each connection."""
    found: list[tuple[Path | None, str | None]] = []

    def connect(url: str, ca: Path | None = None, proxy: str | None = None) -> FakeCoordinator:
        found.append((ca, proxy))
        return behind

    monkeypatch.setattr(site_membership, "HttpsTransport", connect)
    return found


def test_another_proxy_counts_from_now_on(
    behind: FakeCoordinator, ways: list[tuple[Path | None, str | None]], tmp_path: Path
) -> None:
    """With the invite or without it. It was passed over in silence."""
    seat, invite = SiteMembership(tmp_path), given(behind, hours=24)
    seat.enrolled(invite, None, "http://old:3128")
    behind.approve("site-1")
    new, newer = "http://new:3128", "http://newer:3128"
    for again, proxy, kept in [(None, new, new), (None, None, new), (invite, newer, newer), (invite, None, newer)]:
        assert seat.enrolled(again, None, proxy).proxy == kept
        seat.task()
        assert ways[-1] == (None, kept)
    seat.enrolled(None, None, "")
    assert seat.task().round == 1 and not ways[-1][1]


def test_another_certificate_needs_the_invite(
    behind: FakeCoordinator, ways: list[tuple[Path | None, str | None]], tmp_path: Path
) -> None:
    """docs/security.md 2.6: the invite decides which is trusted. The same command without INVITE still goes on."""
    seat, invite = SiteMembership(tmp_path / "run"), given(behind, hours=24)
    first, second = (certificate(tmp_path, name)[0] for name in ("first", "second"))
    seat.enrolled(invite, first, None)
    behind.approve("site-1")
    seat.enrolled(None, first, None)
    with pytest.raises(RunError, match=r"second\.pem does not hold the certificate .* trusts: give INVITE, too"):
        seat.enrolled(None, second, None)
    assert (seat.home / "ca.pem").read_text().strip() == first.read_text().strip()
    seat.enrolled(invite, second, None)
    seat.enrolled(None, second, None)
    seat.task()
    assert ways[-1] == (seat.home / "ca.pem", None)
    assert (seat.home / "ca.pem").read_text().strip() == second.read_text().strip()


def test_a_refused_reply_waits_for_another_deadline(behind: FakeCoordinator, tmp_path: Path) -> None:
    """docs/decisions/0077: a site that stays sends it again once the coordinator has extended the round, not at each
    of its looks; one that begins anew sends it at once."""
    seat, heard = SiteMembership(tmp_path), list[Delivery]()
    seat.enrolled(given(behind, hours=24), None, None)
    behind.approve("site-1")
    behind.refuse["reply"] = Refusal(code="bad_contribution", message="n_train is above 10000")
    told, (one,) = seat.meet(Reply(1, Payload({}, {}).to_bytes()), heard.append, {})
    assert (one.outcome, one.message) == ("refused", "n_train is above 10000")
    behind.refuse.clear()
    assert seat.meet(None, heard.append, {1: told.deadline_ms})[1] == [] and not behind.effects
    behind.now_ms += HOUR_MS  # and with it the deadline
    (taken,) = seat.meet(None, heard.append, {1: told.deadline_ms})[1]
    assert taken.outcome == "accepted" and heard == [taken] and len(behind.effects) == 1


def test_a_refused_reply_is_sent_at_once_by_a_new_join(behind: FakeCoordinator, tmp_path: Path) -> None:
    """docs/reference/runs.md, a live federation: the operator who mended the reason asks the site to start it anew."""
    seat = SiteMembership(tmp_path)
    seat.enrolled(given(behind, hours=24), None, None)
    behind.approve("site-1")
    behind.refuse["reply"] = Refusal(code="bad_contribution", message="n_train is above 10000")
    seat.meet(Reply(1, Payload({}, {}).to_bytes()), lambda _: None, {})
    behind.refuse.clear()
    assert [one.outcome for one in seat.meet(None, lambda _: None, {})[1]] == ["accepted"]
