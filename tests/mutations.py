"""Plants the mistakes of planted.py in the code, one at a time, and runs the test that should find each.

    python tests/mutations.py                       # all
    python tests/mutations.py zero order            # those with one of these words in the name or the file
    python tests/mutations.py --jobs 2              # two at a time
    python tests/mutations.py --sample 10 --seed 3  # ten of them at random

For each, src is copied, the mistake is made in the copy, and a process forked from this one runs the test, with the
copy at the head of its path; the ranks and commands that it starts import the copy, too. Before that the tests run
once on the code as it is. Exit status 1: these fail, a text to replace does not occur exactly once, or a mistake is not
found.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, as in conftest.py

import argparse
import contextlib
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401  imported once, for all the processes that are forked
import psutil  # noqa: F401
import pytest
import torch  # noqa: F401
from planted import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
_FORK = multiprocessing.get_context("fork")
_TEST_S = 120  # a mistake may make ranks wait for each other
_RUN_S = 600
_MOST_SAID = 2000


class Result(NamedTuple):
    """What became of a run of tests."""

    failed: str | None  # the first test that failed; none ran after it
    status: int  # of pytest
    num_passed: int = 0
    said: str = ""  # the end of what pytest said, if it ended for another reason

    def __str__(self) -> str:
        if self.failed:
            return f"found by {self.failed}"
        if self.is_skipped:
            return "not looked for: its tests are skipped on this machine"
        return f"NOT FOUND ({self.num_passed} tests passed, pytest's exit status {self.status}){self.said}"

    @property
    def is_skipped(self) -> bool:
        return not (self.failed or self.status or self.num_passed)


Run = Callable[[], Result]


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    words = options.words
    chosen = [each for each in MUTATIONS if not words or any(word in f"{each.name} {each.file}" for word in words)]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    if not chosen:
        print(f"no mutation has one of these words: {' '.join(words)}")
        return 1
    misplaced = [each for each in chosen if (ROOT / "src/paceline" / each.file).read_text().count(each.old) != 1]
    for each in misplaced:
        print(f"{each.file} does not have exactly once: {each.old!r} ({each.name})")
    if misplaced:
        return 1
    with tempfile.TemporaryDirectory(prefix="paceline-mutations-") as folder:
        failed = _failed_as_it_is(chosen, Path(folder))
        if failed:
            print(f"the tests fail on the code as it is: {failed}")
            return 1
        results = _plant(chosen, options.jobs, Path(folder))
    _print_table(results)
    return int(not all(result.failed or result.is_skipped for result in results.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutations with one of these words in the name or the file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many run at the same time")
    parser.add_argument("--sample", type=int, metavar="N", help="how many to take, at random")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample")
    return parser


def _failed_as_it_is(chosen: Sequence[Mutation], folder: Path) -> str | None:
    """Returns the first test that fails without a mistake. Leaves the cache of the tests full."""
    for is_long in (False, True):
        tests = sorted({each.test for each in chosen if each.is_long == is_long})
        if tests:
            source = shutil.copytree(ROOT / "src", folder / f"src-{is_long}")
            run = partial(_run_tests, source, tests, folder / "cache", is_long)
            ((_, result),) = _results([run], jobs=1, limit_s=10 * _RUN_S)
            if result.failed or result.status:
                return result.failed or f"pytest's exit status {result.status}{result.said}"
    return None


def _plant(chosen: Sequence[Mutation], jobs: int, folder: Path) -> dict[Mutation, Result]:
    runs = [partial(_run_mutated, each, folder / str(number), folder / "cache") for number, each in enumerate(chosen)]
    results = {}
    for number, result in _results(runs, jobs, _RUN_S):
        each = chosen[number]
        results[each] = result
        print(f"{each.file}: {each.name}\n    {result}", flush=True)
        shutil.rmtree(folder / str(number), ignore_errors=True)
    return results


def _print_table(results: Mapping[Mutation, Result]) -> None:
    planted = Counter(each.room for each in results)
    found = Counter(each.room for each, result in results.items() if result.failed)
    skipped = Counter(each.room for each, result in results.items() if result.is_skipped)
    print(f"\n{'room':12} planted  found  skipped")
    for room in sorted(planted):
        print(f"{room:12} {planted[room]:7} {found[room]:6} {skipped[room]:8}")
    print(f"{'all':12} {planted.total():7} {found.total():6} {skipped.total():8}")


def _results(runs: Sequence[Run], jobs: int, limit_s: float) -> Iterator[tuple[int, Result]]:
    """Yields each run's number and result, as they end. Each has a process of its own, `jobs` at a time."""
    waiting = list(enumerate(runs))
    under_way: dict[Connection, tuple[int, BaseProcess, float]] = {}
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            number, run = waiting.pop(0)
            receiver, sender = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_send_result, args=(run, sender))
            process.start()
            sender.close()
            under_way[receiver] = number, process, time.monotonic() + limit_s
        ready = wait(under_way, timeout=1)
        late = [each for each, (_, _, deadline) in under_way.items() if time.monotonic() > deadline]
        for receiver in [*ready, *(each for each in late if each not in ready)]:
            assert isinstance(receiver, Connection)
            number, process, _ = under_way.pop(receiver)
            yield number, _end(process, receiver)


def _send_result(run: Run, sender: Connection) -> None:
    os.setsid()  # its end takes along what a test has left
    sender.send(run())
    sender.close()


def _end(process: BaseProcess, receiver: Connection) -> Result:
    assert process.pid is not None
    try:
        result = receiver.recv() if receiver.poll() else Result(None, -signal.SIGKILL)
    except EOFError:  # it died
        process.join()
        result = Result(None, process.exitcode or -1)  # it said nothing, whatever its status
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return result


def _run_mutated(mutation: Mutation, folder: Path, full_cache: Path) -> Result:
    source = shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = source / "paceline" / mutation.file
    file.write_text(file.read_text().replace(mutation.old, mutation.new))
    cache = shutil.copytree(full_cache, folder / "cache")  # which the mistake may spoil
    return _run_tests(source, [mutation.test], cache, mutation.is_long)


def _run_tests(source: Path, tests: Sequence[str], cache: Path, is_long: bool) -> Result:
    """Runs the tests in this process with `source` in the place of src, up to the first failure."""
    cache.mkdir(exist_ok=True)
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "PACELINE_TEST_CACHE": str(cache)}
    os.chdir(ROOT)
    output = cache.with_name("output")
    for standard, opened in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(output, os.O_WRONLY | os.O_CREAT))):
        os.dup2(opened, standard)
    os.dup2(1, 2)
    kind = () if is_long else ("-m", "not long")
    flags = (*kind, "-x", "-q", "--few", "--tb=no", "-p", "no:cacheprovider", f"--timeout={_TEST_S}")
    seen = _Seen()
    status = pytest.main([*flags, *(f"tests/{test}" for test in tests)], plugins=[seen])
    sys.stdout.flush()
    said = "" if seen.failed or not status else "\n" + output.read_text(errors="replace")[-_MOST_SAID:]
    return Result(seen.failed, int(status), seen.num_passed, said)


class _Seen:
    failed: str | None = None
    num_passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_passed += report.when == "call" and report.passed
        if report.failed and self.failed is None:
            self.failed = report.nodeid.removeprefix("tests/")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
