"""Runs methods over sites: settings, run directory, phases, checkpoints, results."""
