"""Where a run lives: which rank this process is, on which device, and the one door to the other ranks."""
