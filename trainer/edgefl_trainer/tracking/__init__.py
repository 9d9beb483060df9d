"""Runs followed from outside, in TensorBoard and MLflow: `--track`.

    tracks        what `--track` names, read and checked before anything begins
    figures       which of a run's figures are sent, and under which names
    tracker       the interface of a tracker
    following     a thread for each tracker: it reads what the run leaves on the disk, and never stops or delays the run
    tensorboard   event files in a folder
    mlflow        an MLflow server, reached by MLflow's own library

What is sent: settings without folders, numbers of `metrics.jsonl` and `summary.json`, digests. No picture, no name of a
row or lesion, no secret. Source: docs/design.md 2; docs/guides/follow-runs.md.
"""
