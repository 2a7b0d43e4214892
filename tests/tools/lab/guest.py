"""What the hosts of a test run: `lab ... -- exec python guest.py WHAT ...`. Needs no paceline, and no torch."""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

RANK, NUM_HOSTS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESSES = [f"10.0.0.{i + 1}" for i in range(NUM_HOSTS)]
NAMES = "abcdefgh"[:NUM_HOSTS]
PORT = 5000
WINDOW_S = 0.1


def connect(host: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, PORT), 5)
        except ConnectionRefusedError:  # not listening yet
            time.sleep(0.01)


def meet() -> None:
    """Says who it is, and whom it reached by name; ends when all have reached it."""
    heard: list[str] = []
    server = socket.create_server(("0.0.0.0", PORT))

    def listen() -> None:
        for _ in range(NUM_HOSTS - 1):
            with server.accept()[0] as connection:
                heard.append(connection.makefile().readline().strip())

    listener = threading.Thread(target=listen)
    listener.start()
    for name in NAMES:
        if name != NAMES[RANK]:
            with connect(name) as connection:
                connection.sendall(f"{socket.gethostname()}\n".encode())
    listener.join(10)
    facts = {
        "name": socket.gethostname(),
        "heard": sorted(heard),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "cores": sorted(os.sched_getaffinity(0)),
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
        "environment": {name: os.environ.get(name) for name in ("LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")},
    }
    print(json.dumps(facts))


def receive(folder: str, num_senders: str) -> None:
    """Host a: counts what each sender brings, in windows, until all have said goodbye or a file `stop` is there."""
    server = socket.create_server((ADDRESSES[0], PORT))
    log = (Path(folder) / "received.jsonl").open("w", buffering=1)

    def count(connection: socket.socket, sender: str) -> None:
        number, began = 0, time.monotonic()
        connection.settimeout(WINDOW_S)
        while True:
            try:
                more = len(connection.recv(1 << 20))
            except TimeoutError:
                more = -1
            except ConnectionError:
                more = 0
            number += max(more, 0)
            now = time.monotonic()
            if now - began >= WINDOW_S or not more:
                row = {"from": sender, "begin_s": began, "end_s": now, "bytes": number, "is_over": not more}
                log.write(json.dumps(row) + "\n")
                number, began = 0, now
            if not more or (Path(folder) / "stop").exists():
                return

    threads = []
    for _ in range(int(num_senders)):
        connection, (address, _) = server.accept()
        threads.append(threading.Thread(target=count, args=(connection, NAMES[ADDRESSES.index(address)])))
        threads[-1].start()
    for thread in threads:
        thread.join()


def send(seconds: str) -> None:
    """Other hosts: as fast as it goes."""
    block = bytes(1 << 17)
    until = time.monotonic() + float(seconds)
    with connect(ADDRESSES[0]) as connection:
        connection.settimeout(60)
        while time.monotonic() < until:
            connection.sendall(block)


def burn(seconds: str) -> None:
    """Tells, every so many seconds, what part of the time it had a processor."""
    while True:
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() - began < float(seconds):
            pass
        print(json.dumps({"share": (time.process_time() - used) / (time.monotonic() - began)}), flush=True)


def main(what: str, *arguments: str) -> None:
    if what == "flow":  # FOLDER SECONDS
        folder, seconds = arguments
        receive(folder, str(NUM_HOSTS - 1)) if RANK == 0 else send(seconds)
    else:
        {"meet": meet, "burn": burn}[what](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
