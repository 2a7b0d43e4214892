"""Measurements of one machine, one command each: `paceline bench VERB`."""
