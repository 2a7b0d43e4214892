"""Who sees the folder that checkpoints go to, and so what each rank does when they are saved."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.base.errors import UserError
from paceline.base.files import write_synced
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.save import Saver
from paceline.world.group import Group, SideChannel

_TOKEN = ".seen"  # written by rank 0 while ranks ask: who reads it sees the same folder


def who_sees(group: Group, folder: Path) -> tuple[list[int], str]:
    """Returns the ranks that see rank 0's folder, which is there: those of its host, and others where disks are shared;
    and a token, random, of this life of the ranks. Collective. Raises UserError on all where rank 0 cannot write."""
    answer: dict[str, str] = {}
    if group.rank == 0:
        answer = {"token": secrets.token_hex(8)}
        try:
            write_synced(folder / _TOKEN, answer["token"].encode(), 0o600)
        except OSError as error:
            answer = {"error": f"cannot write to {folder}: {error.strerror}"}
    answer = group.broadcast_json(answer)
    if "error" in answer:
        raise UserError(answer["error"], reach="world")
    path = folder / _TOKEN
    sees = path.exists() and path.read_text() == answer["token"]
    seers = [rank for rank, row in enumerate(group.share_integers([int(sees)])) if row[0]]
    if group.rank == 0:
        path.unlink()
    return seers, answer["token"]


def open_saver(
    group: Group,
    checkpoints: Path,
    config: CheckpointConfig,
    seers: Sequence[int],
    token: str,
    *,
    owns_alone: bool,
    before_publishing: Callable[[], object] = lambda: None,
) -> Saver:
    """Returns this rank's part in saving: it writes where it sees the folder; else what it `owns_alone`, as with
    sharded state, is sent to rank 0 through a channel of its own. Collective."""
    blind = [rank for rank in range(group.size) if rank not in seers]
    relay = SideChannel() if blind and owns_alone else None
    return Saver(
        checkpoints,
        config,
        seers.index(group.rank) if group.rank in seers else None,
        len(seers),
        token=token,
        relay=relay,
        relayed=blind if relay else (),
        before_publishing=before_publishing,
    )
