"""Records: the run folder with its files, and what rank 0 prints on the terminal."""
