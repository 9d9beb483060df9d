"""`edgefl ask --log`: what is kept of a question and its answer. Source: docs/security.md, check 70."""

import hashlib
import json

from tests.asking import rows


def test_the_log_holds_figures_and_no_words(asked, ward):
    """docs/security.md, check 70: the same for answers; a question may name a patient."""
    log, question = ward / "log.sqlite", "which organ, please?"
    told = json.loads(asked(question, "--json", "--log", log)[1])
    assert asked("word " * 10_000, "--log", log)[0] == 1
    assert asked(question, "--log", log, image=ward / "missing.png")[0] == 1
    assert asked("which organ, Mrs CANARYNAME?", "--log", log)[0] == 0
    found = rows(log)
    assert len(found) == 4 and b"CANARY" not in log.read_bytes() and log.stat().st_mode & 0o777 == 0o600
    assert found[0]["question_sha256"] == hashlib.sha256(question.encode()).hexdigest()
    assert found[0]["image_sha256"] == hashlib.sha256((ward / "CANARY.png").read_bytes()).hexdigest()
    assert found[0]["answer"] == told["answer"] and found[0]["entropy_nats"] == told["entropy_nats"]
    best = list(json.loads(found[0]["probabilities"]).items())[:5]
    assert best == [(one["answer"], one["confidence"]) for one in told["answers"]]
    assert [row["error_code"] for row in found] == [None, "bad_question", "missing", None]
    again = json.loads(asked(question, "--json", "--log", log)[1])
    assert again["answers"] == told["answers"]


def test_a_log_of_scores_takes_no_answers_and_the_reverse(run, asked, ward, files):
    scores, answers = ward / "scores.sqlite", ward / "answers.sqlite"
    options = ("--model", files / "model.edgefl", "--trust", files / "signing.pub", "--log")
    assert run("score", files / "good.png", *options, scores)[0] == 0
    assert asked("which organ?", "--log", answers)[0] == 0
    code, out, err = asked("which organ?", "--log", scores)
    assert (code, out) == (1, "") and "not a log of answers" in err
    code, out, err = run("score", files / "good.png", *options, answers)
    assert (code, out) == (1, "") and "not a log of scores" in err
