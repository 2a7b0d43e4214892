"""Shows the records of runs as one self-contained HTML page with plots."""
