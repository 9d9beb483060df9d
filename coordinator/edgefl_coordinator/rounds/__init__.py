"""Rounds: their states, which replies count, and the aggregation worker."""
