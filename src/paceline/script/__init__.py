"""Your own model and script, data-parallel by a few lines: the objects that `paceline train` itself runs on.

    world = paceline.join()                               # torchrun's world, or one process        joining.py
    replica = paceline.Replica(model, optimizer, world)   # equal weights, summed gradients         replica.py
    batches = paceline.share(loader, world)               # each rank draws its own part            share.py
    replica.save(folder); replica.restore(folder)         # any world resumes                       keeping.py

`dealing.py` and `drawing.py` are behind `share`: which samples are this rank's, and how they are read. What goes wrong
silently elsewhere is an error or a warning here, with the script's line (mistakes.py, workers.py).
"""
