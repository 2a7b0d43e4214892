"""Sums gradients over ranks, so that every replica makes the same update. Read naive.py first."""
