"""Audit a finished run: attack each kind of payload, and the final models, with what fits it.

    maps, features, prototypes, logits    re-identification and reconstruction of pictures
    weights                               the same, by what a round changes of the head
    weights, prompts                      membership, by the model that a site sent
    the site's final model                membership

A kind that is not attacked, or for which there are too few pictures, is named with the reason. Source: docs/security.md
7, checks 53 and 54.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from edgefl_protocol.sentences import counted
from edgefl_trainer.audit.audited import Audited, open_audit
from edgefl_trainer.audit.line import AuditLine, NotAttacked
from edgefl_trainer.audit.member_lines import membership_lines
from edgefl_trainer.audit.payload_lines import payload_lines
from edgefl_trainer.audit.result import AuditResult, kept_of_others
from edgefl_trainer.audit.sent_models import CARRIERS, sent_models
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.errors import RunError


def audit(run: FinishedRun, names: Sequence[str], pictures: int, report: Callable[[str], None]) -> AuditResult:
    """Attack what the named sites of a run sent and learned; no name is all of them.

    What `audit.json` of the same state tells of other sites is in the result, too.

    Args:
        pictures: most that are looked for at a site.
        report: told what is being attacked.

    Raises:
        RunError: the run answers questions, has no such site, its data have changed, nothing could be attacked, or the
            result cannot stand beside what is kept of other sites.
        DataError: its data are no longer there.
    """
    audited = open_audit(run, names, pictures, report)
    kept, kept_out = kept_of_others(run, names, pictures)  # before the minutes that the attacks take
    lines: list[AuditLine] = []
    left_out: list[NotAttacked] = []
    for found in chain(payload_lines(audited), _model_lines(audited)):
        if isinstance(found, AuditLine):
            lines.append(found)
            report(f"{found.kind}: {found.attack}: {found.figure:.3f}, {found.verdict}")
        else:
            left_out.append(found)
    if not lines:
        for one in left_out:
            report(one.told)
        raise RunError(
            f"nothing of the run in {run.folder} could be attacked, for the reasons above: audit a run with more "
            "pictures, or of another method (docs/reference/runs.md, What leaves, attacked, says how many)."
        )
    if kept or kept_out:
        report(f"what audit.json tells of other sites stays: {counted(len(kept), 'line')}")
    return AuditResult(
        method=run.settings.method,
        travels=tuple(run.summary.get("travels", [])),
        state_sha256=run.summary["state_sha256"],
        pictures=pictures,
        lines=(*lines, *kept),
        not_attacked=(*left_out, *kept_out),
    )


def _model_lines(audited: Audited) -> Iterator[AuditLine | NotAttacked]:
    kind = " and ".join(kind for kind in audited.method.travels if kind in CARRIERS)
    if "prompts" in audited.method.travels:
        why = "pictures are sought in what a round changes of the head, not of the prompts"
        yield NotAttacked("prompts", "re-identification and reconstruction", why)
    if not audited.run.sites:
        why = (
            "the run learned an encoder without labels, and membership is inferred from what a model says of labelled "
            "rows"
        )
        yield NotAttacked(f"{kind} and model" if kind else "model", "membership", why)
        return
    if kind:
        yield from membership_lines(audited, kind, *sent_models(audited))
    models = {name: audited.run.predictor(name) for name in audited.sites if name in audited.run.sites}
    yield from membership_lines(audited, "model", models, {})
