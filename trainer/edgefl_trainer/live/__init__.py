"""A site of this machine in a live federation: `edgefl-train join`.

    joining           the loop from the invite to the last hand-out, waiting where there is nothing to do
    site_membership   keys, enrolment, outbox: the side towards the coordinator
    site_work         what the signed task and the site's own data make together: method, settings, task, site
    exchanges         one exchange: broadcast → the method's site half → reply, each step durable before the next
    final_results     the run directory a site is left with: model, calibration, figures

It talks to the coordinator through `edgefl_exchange`, and imports nothing of the device.
Source: docs/design.md 2, 4 and 5; docs/decisions/0030.
"""

from edgefl_trainer.live.joining import Join, join
from edgefl_trainer.live.site_membership import SiteMembership
from edgefl_trainer.live.site_work import SiteOptions

__all__ = ["Join", "SiteMembership", "SiteOptions", "join"]
