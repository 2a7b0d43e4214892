"""Training runs. Read loop.py first, then replica/step.py."""
