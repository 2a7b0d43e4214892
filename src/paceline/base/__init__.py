"""What every module may import: errors, units, clocks, seeds. Standard library only: `--help` needs no torch."""
