"""What `edgefl-train audit` found, as a section of a report: each figure with its verdict, and why it is that."""

from collections.abc import Sequence

from edgefl_protocol.sentences import capital, counted, joined_by_and, listed
from edgefl_trainer.audit.line import FIGURES, MEANINGS, AuditLine
from edgefl_trainer.audit.result import AuditResult
from edgefl_trainer.audit.text import NO_PROOF
from edgefl_trainer.reports.blocks import ReportBlock, ReportCell, ReportTable, Section, Words, plain
from edgefl_trainer.reports.run_facts import RunFacts

TITLE = "Audit of what leaves a site"
HEAD = ("what is attacked", "attack", "figure, 95 %", "floor", "control", "target", "pictures", "sites", "verdict")
ANOTHER_STATE = "audit.json was made of another state than this run has now: its figures are not shown. Audit it again."


def audit_section(facts: RunFacts) -> Section | None:
    """Show what `edgefl-train audit` found; None where it was not asked."""
    if facts.audit is None:
        return None
    if facts.audit_is_of_another_state:
        return Section(title=TITLE, blocks=[Words(text=ANOTHER_STATE)])
    found = facts.audit
    most = "" if found.pictures is None else f" At most {found.pictures:,} training pictures of a site were looked for."
    blocks: list[ReportBlock] = [
        Words(
            text="Attacks on what left the sites, and on their models, as `edgefl-train audit` made them on this run's "
            "present state. The floor is what an attack reaches without what was sent. The control is what it reaches "
            "on an unprotected input: where that is less than needed, the attack could not have shown a leak. "
            "Below the floor stands whether figure minus floor, of the same pictures, is above 0 in its whole interval."
            + most
        ),
        *([_figures(found.lines), _reasons(found.lines)] if found.lines else []),
        _meanings(),
        Words(text=NO_PROOF),
    ]
    blocks += [_not_attacked(found)] if found.not_attacked else []
    if never := found.never_attacked(facts.trained):
        part = f"{len(never)} of {counted(len(facts.trained), 'site')}"
        told = f"Never attacked: {listed(never)}, {part}. Nothing is known of what left there."
        blocks.append(Words(text=told))
    return Section(title=TITLE, blocks=blocks)


def measured(kinds: Sequence[str], facts: RunFacts) -> str:
    """Say of which kinds an audit measured how much they tell of pictures and at how many sites, and of which none did.

    Kinds that were measured at equally many sites share a sentence.
    """
    counts = {kind: len(facts.measured_at(kind)) for kind in kinds}
    told, all_sites = "", len(facts.trained)
    for count in sorted(set(counts.values()), reverse=True):
        some = joined_by_and([kind for kind in kinds if counts[kind] == count])
        where = f" at {count} of {counted(all_sites, 'site')}" if count < all_sites else ""
        said = f"was measured{where}: see the audit below" if count else "was not measured in this run"
        told += f" How much {some} tell of them {said}."
    return "What leaves is no picture, but is made of pictures." + told


def _figures(lines: Sequence[AuditLine]) -> ReportTable:
    families = dict.fromkeys(line.family for line in lines)
    told = [f"{capital(name)}: {FIGURES[name]}." for name in families if name in FIGURES]
    return ReportTable(
        head=HEAD,
        rows=[
            [
                *plain(line.kind, line.attack),
                ReportCell(line.written(line.figure), below=line.between(line.interval)),
                ReportCell(line.written(line.floor), below=line.floor_verdict or ""),
                ReportCell(line.written(line.control), below=f"needed {line.written(line.needs)}"),
                *plain(line.written(line.target), f"{line.pictures:,}", ", ".join(line.sites), line.verdict),
            ]
            for line in lines
        ],
        text_columns=(0, 1, 7, 8),
        caption=" ".join(["What was measured. The higher a figure, the more the attack learned.", *told]),
    )


def _reasons(lines: Sequence[AuditLine]) -> ReportTable:
    return ReportTable(
        head=("line", "why its verdict is that", "what was attacked, and how", "floor", "control"),
        rows=[
            [
                *plain(f"{line.kind}, {line.attack}, at {', '.join(line.sites)}", line.reason),
                ReportCell(f"{line.against}; by {line.measure}" + f". Further: {line.further}" * bool(line.further)),
                ReportCell(line.floor_of, below=f"figure minus floor, of the same pictures: {line.beside_floor}"),
                ReportCell(line.control_of),
            ]
            for line in lines
        ],
        text_columns=(0, 1, 2, 3, 4),
        caption="Why each verdict is what it is, and what its figures were measured with.",
    )


def _meanings() -> ReportTable:
    rows = [plain(verdict, meaning) for verdict, meaning in MEANINGS.items()]
    return ReportTable(head=("verdict", "meaning"), rows=rows, text_columns=(0, 1), caption="What the verdicts mean.")


def _not_attacked(found: AuditResult) -> ReportTable:
    rows = [plain(one.kind, one.attack, one.why) for one in found.not_attacked]
    caption = "What was not attacked, and why: nothing is known of it."
    return ReportTable(head=("what left", "attack", "why not"), rows=rows, text_columns=(0, 1, 2), caption=caption)
