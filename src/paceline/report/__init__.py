"""Showing: the records of runs as one HTML page with plots, which needs nothing beside it."""
