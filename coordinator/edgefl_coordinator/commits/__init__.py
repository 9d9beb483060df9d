"""Commits that many requests share, and the one thread that carries those requests."""
