"""Measurements. A figure in docs/ names the one that made it; `python -m benchmarks.ROOM.NAME` runs one again."""
