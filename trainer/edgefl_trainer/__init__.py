"""Learning, on a machine with PyTorch: methods, models, losses, data, engine, evaluation, and `edgefl-train`.

Needs the extra `edgefl-derm[trainer]`. Nothing is imported here, so that `edgefl-train --help` stays quick and works in
the base install. Start at `contract` for what a method is, at `engine.run` for what a run does.
"""
