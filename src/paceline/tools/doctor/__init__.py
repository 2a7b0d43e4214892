"""`paceline doctor`: what is wrong with these machines, and the command that fixes it, before a run costs anything."""
