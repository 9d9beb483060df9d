"""Whose bundles a device accepts, and which bundle it uses."""
