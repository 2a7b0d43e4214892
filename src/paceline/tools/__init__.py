"""Tools that read a run's records or start runs. Nothing that trains imports them."""
