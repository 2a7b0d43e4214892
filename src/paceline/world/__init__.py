"""The world: which rank this process is, on which device, and its communication with the other ranks."""
