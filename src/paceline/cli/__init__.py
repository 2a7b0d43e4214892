"""The command line: one short file a verb, each imported only when its verb runs."""
