"""Keeping: a checkpoint is complete or absent, verified before use, free of code and of ranks."""
