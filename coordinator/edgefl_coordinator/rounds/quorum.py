"""Which settings let a federation finish its rounds: asked by `init`, and before an operator's change counts. Pure.

Guarantees: with settings that pass, a round that `quorum_min` living members answer closes, and each of them may have
the broadcast of the next one, so the federation ends. Source: docs/decisions/0041.
"""

from dataclasses import dataclass

from edgefl_coordinator.settings import LEAST_COHORT, USUAL_COHORT, RoundSettings, TaskSettings
from edgefl_protocol.sentences import counted

USUAL_MEMBERS = 3
ALLOW = "rounds.allow_small_cohort"
SettingChanges = dict[str, object]  # setting → value, as `set` takes them


@dataclass(frozen=True)
class Quorum:
    """Replies and others that rounds need."""

    quorum_min: int
    quorum_target: int
    min_cohort: int


def usual_quorum(
    members: int, least: int | None = None, target: int | None = None, cohort: int | None = None
) -> Quorum:
    """Return what fits so many members: the contributions of three others, of two in a federation of three.

    What an operator gave, `least` and `target` replies or `cohort` others, is taken as it is, and the rest fits it.
    """
    target = members if target is None else target
    if cohort is None:
        cohort = max(0, min(USUAL_COHORT, members - 1, target - 1, target if least is None else least - 1))
    return Quorum(
        quorum_min=min(cohort + 1, target) if least is None else least, quorum_target=target, min_cohort=cohort
    )


def unfinishable(rules: RoundSettings, task: TaskSettings, members: int | None = None) -> str:
    """Say why a federation with these settings would stop for good, and what to give instead; "" where it would not.

    `members` is how many take part; None where that is not known. Settings are named as `set` takes them.
    """
    if rules.quorum_min <= rules.min_cohort:
        others, cohort = rules.quorum_min - 1, rules.min_cohort
        risky = f" with {ALLOW} true" if others < LEAST_COHORT and not rules.allow_small_cohort else ""
        return (
            "the rounds could stop for good: if a round closes with "
            f"{counted(rules.quorum_min, 'reply', 'replies')}, each member has {counted(others, 'other', 'others')}, "
            f"but the next broadcast needs {cohort} or more; give rounds.quorum_min {cohort + 1} or more, or "
            f"rounds.min_cohort {others}{' or less' if others else ''}{risky}"
        )
    if members is not None and members < rules.quorum_min:
        return (
            f"a round needs {counted(rules.quorum_min, 'reply', 'replies')}, and {counted(members, 'member')} cannot "
            "give them; lower rounds.quorum_min"
        )
    if members is not None and members < rules.quorum_target and rules.start == "automatic":
        return (
            f"the first round would wait for {rules.quorum_target} approved members, and there will be {members}; "
            "lower rounds.quorum_target, or open the round by hand with rounds.start manual"
        )
    most, classes = task.most_arrays, len(task.classes)
    if most is not None and rules.quorum_min * classes > most:
        return (
            f"maps of {rules.quorum_min} members with {classes} classes are {rules.quorum_min * classes} arrays, "
            f"and at most {most} travel together; give rounds.quorum_min {most // classes} or less"
        )
    return ""


def for_so_many(rules: RoundSettings, replies: int) -> SettingChanges:
    """Return the settings that let a round close with so many replies, and the next one after it; {} for none needed.

    With fewer than `LEAST_COHORT` others `ALLOW` is among them, unless it is given already.
    """
    if not 1 <= replies < rules.quorum_min:
        return {}
    changes: SettingChanges = {"rounds.quorum_min": replies}
    others = min(rules.min_cohort, replies - 1)
    changes |= {"rounds.min_cohort": others} if others < rules.min_cohort else {}
    return changes | ({ALLOW: "true"} if others < LEAST_COHORT and not rules.allow_small_cohort else {})


def fitting(rules: RoundSettings, members: int, replies: int) -> SettingChanges:
    """Return the settings that fit so many approved members, of which so many can reply: rounds close, and early."""
    most = max(members, replies)
    target: SettingChanges = {"rounds.quorum_target": most} if 1 <= most < rules.quorum_target else {}
    return target | for_so_many(rules, replies)


def is_risky(changes: SettingChanges) -> bool:
    """Tell whether changes lower the cohort so far that a single contribution can be told apart."""
    others = changes.get("rounds.min_cohort")
    return isinstance(others, int) and others < LEAST_COHORT


def beyond_members(rules: RoundSettings, members: int) -> tuple[str, SettingChanges]:
    """Say why rounds cannot close, or close late, with so many approved members, and what to set; "" where they do."""
    there = f"and {counted(members, 'member is', 'members are')} approved"
    changes = fitting(rules, members, members)
    if members < rules.quorum_min:
        wanted = counted(rules.quorum_min, "reply", "replies")
        return f"a round needs {wanted}, {there}, so none can close", changes
    if changes:
        closes = counted(rules.quorum_target, "reply", "replies")
        return f"a round closes early at {closes}, {there}, so each waits for its deadline", changes
    return "", {}


def when_it_closes(quorum_min: int, quorum_target: int) -> str:
    """Say, as a clause after "a round", when one closes."""
    if quorum_min == quorum_target:
        return f"closes as soon as {counted(quorum_target, 'reply is', 'replies are')} there"
    return (
        f"closes as soon as {counted(quorum_target, 'reply is', 'replies are')} there, or at its deadline with at "
        f"least {quorum_min}"
    )


def set_command(changes: SettingChanges) -> str:
    """Return the command that makes changes."""
    return " ".join(["edgefl-coordinator set", *(f"{key} {value}" for key, value in changes.items())])
