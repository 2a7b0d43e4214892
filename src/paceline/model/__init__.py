"""Tokens in, a loss out. Plain tensors and numbers; no ranks and no groups."""
