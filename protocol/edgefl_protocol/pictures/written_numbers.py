"""How the numbers of scores and answers are written.

Guarantees: two numbers that are compared are told apart, by one digit more or as "just below"; nothing short of
certainty is rounded to it. Device and trainer write numbers so. Source: docs/reference/scores.md, "Referral".
"""

import math

MOST_EXTRA_DIGITS = 1  # in which numbers that are compared are told apart; beyond, words say which is less


def percent(share: float, digits: int = 0) -> str:
    """Write a probability; nothing short of certainty is rounded to it, nor anything above none to none."""
    said, step = f"{share:.{digits}%}", 10.0**-digits
    if float(said[:-1]) == 0:
        return said if share == 0 else f"<{step:.{digits}f}%"
    return said if float(said[:-1]) < 100 else f">{100 - step:.{digits}f}%"


def apart(value: float, limit: float) -> tuple[str, str]:
    """Write a number and the limit it is compared with: in one digit more, or in words, where they would read alike."""
    if value == limit:
        return f"{value:.2f}", f"{limit:.2f}"
    for digits in range(2, 3 + MOST_EXTRA_DIGITS):
        said = f"{value:.{digits}f}", f"{limit:.{digits}f}"
        if said[0] != said[1]:
            return said
    return f"just {'below' if value < limit else 'above'} {said[1]}", said[1]


def against(share: float, limit: float, digits: int) -> tuple[str, str]:
    """Write a probability and the limit it is compared with; one below it never reads like it."""
    said = percent(share, digits), percent(limit, digits)
    return (f"just below {said[1]}", said[1]) if share < limit and said[0] == said[1] else said


def digits_apart(values: set[float]) -> int:
    """Count the digits in which no value reads like another, as far as `MOST_EXTRA_DIGITS` tell them apart."""
    enough = (n for n in range(MOST_EXTRA_DIGITS) if len({percent(value, n) for value in values}) == len(values))
    return next(enough, MOST_EXTRA_DIGITS if len(values) > 1 else 0)


def uncertain_share(entropy_nats: float, limit: float | None, answers: int) -> tuple[str, str | None]:
    """Write entropy, and a rule's limit, as shares of the most that it can be with so many answers, ln K."""
    most = math.log(max(answers, 2))  # of a single answer the entropy is 0
    number, above = apart(entropy_nats / most, (entropy_nats if limit is None else limit) / most)
    return number, None if limit is None else above
