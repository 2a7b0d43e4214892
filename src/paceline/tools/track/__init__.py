"""A run's records, sent to trackers and to Prometheus by a process of its own."""
