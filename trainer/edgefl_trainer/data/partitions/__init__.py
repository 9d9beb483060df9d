"""Partitions: who has which image, how that was dealt, and the file that says so."""
