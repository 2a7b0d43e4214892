"""Lessons that run: what data-parallel training does between processes, slowly enough to watch."""
