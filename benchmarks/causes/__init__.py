"""Experiments that isolate why a result is what it is."""
