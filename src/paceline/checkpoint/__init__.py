"""Checkpoints: complete or absent, verified before use; reading one runs no code."""
