"""One step under torch's profiler: what each operator took, on every rank, to be looked at in ui.perfetto.dev."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.profiler

from paceline.train.state import Run


@contextmanager
def profiled(run: Run) -> Iterator[None]:
    """What is inside is traced where it is the step `train.profile`; else nothing happens.

    Each rank writes RUN/profile/step-K-rank-R.json on its host. A disk that takes no trace ends no training.
    """
    step = run.progress.step + 1
    if step != run.config.train.profile:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints its own beginning and end to stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        yield
    path = run.folder.path / "profile" / f"step-{step:08d}-rank-{run.world.rank:05d}.json"
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        profiler.export_chrome_trace(str(path))
        path.chmod(0o600)
    except (OSError, RuntimeError) as error:
        run.console.say(f"the trace of step {step} could not be written to {path}: {error}", style="yellow")
        return
    run.event("profile", step=step, path=f"profile/{path.name}")
    run.console.say(f"traced step {step}: open {path.parent} in https://ui.perfetto.dev (a file a rank)")
