"""Starts ranks. Knows how processes start and end, not what they do."""
