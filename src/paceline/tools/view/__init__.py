"""What the report and the live view both say of a run."""
