"""Starting ranks. Knows how processes are started and ended, nothing of what they do."""
