"""Telling: the run folder with its records, and what one rank says on the terminal."""
