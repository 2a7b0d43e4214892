"""`python -m paceline` and the `paceline` command."""

import contextlib
import os
import signal
import sys

from paceline.base.errors import UserError
from paceline.base.process import end_on_signals
from paceline.world import schedulers

_TRAIN = ("train", "resume")


def main() -> int:
    """Runs the command line and returns its exit status. A rank that fails ends right here."""
    with contextlib.suppress(UserError):  # raised again, and printed, by the verbs that look for a world
        os.environ.update(schedulers.variables(os.environ))
    is_training = sys.argv[1:2] and sys.argv[1] in _TRAIN
    if is_training:
        end_on_signals()
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its deprecated name
            # Less GPU memory is lost between tensors. torch reads it when it is imported, or soon after.
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from paceline.cli import main as cli  # after the line above, so that no signal is lost while it is imported

    status = cli.main()
    if is_training:  # a scheduler that asks the ranks again to stop would change the exit status of those that leave
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if status != 0 and "RANK" in os.environ:
        # Python's own end takes torch down for 0.7 s. A thread that waits for another rank and comes back from there
        # meanwhile, as when that rank dies, too, would abort the process ("terminate called", status -6).
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
