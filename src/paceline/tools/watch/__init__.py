"""Shows runs while they train: in the terminal, and on a live page in a browser."""
