"""`paceline data prepare` is killed at random moments, with 1, 2 and 3 workers and as two shares: the same bytes.

Each time a process (and its workers, or it alone, so that they must notice) gets SIGKILL at a moment drawn from the
time that the undisturbed preparation took, and the command is given again. Then it runs to its end, and all files are
compared with those of the undisturbed one.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prepare import write_text

from paceline.tools.bench.runs import PACELINE

MB = 1e6


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def kill(command: list[str], rng: random.Random, longest_s: float) -> bool:
    """Starts the command and kills it at a random moment. Returns whether it had not ended before."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(rng.uniform(0.0, longest_s))
    except subprocess.TimeoutExpired:
        if rng.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--mb", type=int, default=100, help="size of the sources: a part for every 16 MiB")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_text(root / "text", int(options.mb * MB), longest=int(options.mb * MB / 2))
        prepare = [*PACELINE, "data", "prepare", str(root / "text"), "--tokenizer", "train:1000"]
        prepare += ["--shard-tokens", "5000000", "--out"]
        began = time.perf_counter()
        subprocess.run([*prepare, str(root / "undisturbed")], check=True, stdout=subprocess.DEVNULL)
        longest_s = 0.7 * (time.perf_counter() - began)
        expected = digests(root / "undisturbed")
        one = [["--workers", str(workers)] for workers in (1, 2, 3)]
        for number, shares in enumerate([*([share] for share in one), [["--part-of", "1/2"], ["--part-of", "2/2"]]]):
            out, num_kills = root / f"{number}", 0
            while num_kills < options.kills and not (out / "index.json").exists():
                num_kills += kill([*prepare, str(out), *rng.choice(shares)], rng, longest_s)
            for share in shares:
                subprocess.run([*prepare, str(out), *share], check=True, stdout=subprocess.DEVNULL)
            is_same = digests(out) == expected
            what = " and ".join(" ".join(share) for share in shares)
            print(f"{what}: {num_kills} kills, {'the same bytes' if is_same else 'OTHER BYTES'}", flush=True)
            if not is_same:
                sys.exit(1)


if __name__ == "__main__":
    main()
