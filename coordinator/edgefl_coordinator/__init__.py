"""Placeholder replaced as the package is written."""
