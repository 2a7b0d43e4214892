"""Station 2 of the data flow: tokens in, a loss out. Plain tensors and numbers, no ranks and no groups."""
