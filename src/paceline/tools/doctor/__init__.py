"""`paceline doctor`: what is wrong with these machines, and the command that mends it, before a run costs anything."""
