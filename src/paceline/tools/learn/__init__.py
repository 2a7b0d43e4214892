"""Lessons that run: communication of data-parallel training, slowly enough to watch."""
