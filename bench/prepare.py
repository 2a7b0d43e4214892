"""`paceline data prepare` against tiktoken alone on one core, with one worker and two, and its memory as sources grow.

The text is the standard library's own sources again and again, each time with other numbers in it. tiktoken is given
the text in memory and the vocabulary that prepare trained, and only its encoding is timed; prepare reads files,
encodes, writes shards, syncs and hashes them; its rate is that between the first part and the last. Before the first
it proves the encoder and starts its workers, once, 1.4 s for 50,257 tokens. Sides run in turn.
"""

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from side import run, show, show_header

from paceline.data.sources import embedded
from paceline.tools.bench.runs import PACELINE

TIKTOKEN = """
import sys, time, tiktoken
from pathlib import Path
from paceline.data.encode import Encoder
from paceline.data.tokenizer import Tokenizer
encoding = Encoder(Tokenizer.load(sys.argv[1]))._fast
texts = [path.read_text() for path in sorted(Path(sys.argv[2]).glob("*.txt"))][:150]
size = sum(len(text.encode()) for text in texts)
began = time.perf_counter()
for text in texts:
    encoding.encode_ordinary(text)
print(size / (time.perf_counter() - began))
"""
FILE_BYTES = 1 << 20
MB = 1e6


def write_text(folder: Path, num_bytes: int, longest: int = 0) -> int:
    """Writes one file of at least `longest` bytes, if any, and others of about 1 MiB; returns the bytes written."""
    folder.mkdir(parents=True)
    sources = sorted(embedded().files, key=lambda file: file.name)
    whole = "".join(Path(file.path).read_text(errors="replace") for file in sources)
    texts = (whole.replace("self", f"self{n}").replace("return", f"return_{n}") for n in itertools.count())
    written = number = 0
    if longest:
        with (folder / "000-long.txt").open("w") as file:
            while written < longest:
                file.write(next(texts))
                written = file.tell()
    text = ""
    while written < num_bytes:
        text = text or next(texts)
        path = folder / f"{number:05d}.txt"
        path.write_text(text[:FILE_BYTES])
        text, number, written = text[FILE_BYTES:], number + 1, written + path.stat().st_size
    return written


PREPARE = """
import sys, time
from pathlib import Path
from paceline.data.prepare import prepare
from paceline.data.report import Quiet
from paceline.data.split import gather
from paceline.data.config import Recipe

class Watch(Quiet):
    times = []
    def advance(self, done_bytes, total_bytes, what=""):
        self.times.append((time.perf_counter(), done_bytes))

if __name__ == "__main__":
    source, out, tokenizer, workers = sys.argv[1:]
    recipe = Recipe(tokenizer=tokenizer)
    prepare(gather([source], [], recipe), recipe, Path(out), Watch(), num_workers=int(workers))
    (began, before), (ended, after) = Watch.times[0], Watch.times[-1]
    print((after - before) / (ended - began))
"""


def prepare(source: Path, out: Path, workers: int, tokenizer: Path) -> tuple[float, float, float]:
    """Returns (MB/s between the first part and the last, seconds in all, peak memory of all processes in MB)."""
    command = [sys.executable, "-c", PREPARE, str(source), str(out), str(tokenizer), str(workers)]
    began, peak = time.perf_counter(), 0.0
    process = psutil.Popen(command, stdout=subprocess.PIPE)
    while process.poll() is None:
        peak = max(peak, _memory(process))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"preparing {source} ended with {process.returncode}")
    return float(process.stdout.read()) / MB, time.perf_counter() - began, peak / MB


def _memory(process: psutil.Process) -> float:
    total = 0.0
    try:
        for each in [process, *process.children(recursive=True)]:
            total += each.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate-mb", type=int, default=300, help="size of the source whose rate is measured")
    parser.add_argument("--memory-mb", type=int, nargs="*", default=[10, 1000], help="sources whose memory is measured")
    parser.add_argument("--vocab", type=int, default=50257)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        size = write_text(root / "text", int(options.rate_mb * MB))
        write_text(root / "some", int(10 * MB))
        train = [*PACELINE, "data", "prepare", str(root / "some"), "--out", str(root / "first")]
        run([*train, "--tokenizer", f"train:{options.vocab}"])
        tokenizer = root / "first" / "tokenizer.json"
        rates: dict[str, list[float]] = {"tiktoken": [], "one": [], "two": []}
        for number in range(options.rounds):
            command = [sys.executable, "-c", TIKTOKEN, str(tokenizer), str(root / "text")]
            rates["tiktoken"].append(float(run(command)) / MB)
            for name, workers in (("one", 1), ("two", 2)):
                rate, _, _ = prepare(root / "text", root / f"{name}{number}", workers, tokenizer)
                rates[name].append(rate)
                shutil.rmtree(root / f"{name}{number}")
        show_header()
        for name, label in (
            ("tiktoken", "tiktoken, text in memory, one core"),
            ("one", "prepare --workers 1"),
            ("two", "prepare --workers 2"),
        ):
            show(label, rates[name], "MB/s")
        for name, other in (("one", "tiktoken"), ("two", "one"), ("two", "tiktoken")):
            show(f"{name} / {other}", [a / b for a, b in zip(rates[name], rates[other], strict=True)], "")
        for megabytes in options.memory_mb:
            longest = int(300 * MB) if megabytes >= 400 else 0
            size = write_text(root / f"m{megabytes}", int(megabytes * MB), longest)
            for workers in (1, 2):
                out = root / f"out{megabytes}-{workers}"
                rate, seconds, peak = prepare(root / f"m{megabytes}", out, workers, tokenizer)
                print(
                    f"{size / MB:.0f} MB (longest document {longest / MB:.0f} MB), workers {workers}: "
                    f"{seconds:.1f} s in all, {rate:.1f} MB/s, peak memory {peak:.0f} MB"
                )


if __name__ == "__main__":
    main()
