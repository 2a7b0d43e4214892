"""Your own model and script, data-parallel by a few lines: the objects that `paceline train` itself runs on.

    world = paceline.join()                               # torchrun's world, or one process        joining.py
    replica = paceline.Replica(model, optimizer, world)   # equal weights, summed gradients         replica.py
    checkpoints = paceline.Checkpoints(folder, net=replica)   # any world resumes                   checkpoints.py
    checkpoints.restore()
    for step in replica.steps(loader):                    # each rank draws its own part            share.py
        for x, y in step:                                 #                                         step.py
            step.backward(criterion(model(x), y))
        result = step.finish(max_norm=1.0)
        checkpoints.save_every(500)

`mistakes.py` turns silent mistakes into errors or warnings with the script's line. Imports go one way: checkpoints.py,
replica.py, step.py, model.py, gradients.py and updates.py; docs/ARCHITECTURE.md has the others.
"""
