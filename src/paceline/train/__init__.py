"""The only place that knows all stations. Read loop.py first, then step.py."""
