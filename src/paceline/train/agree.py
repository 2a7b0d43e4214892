"""Before they train, ranks compare their configs and data."""

import json

from paceline.base.errors import UserError
from paceline.config import Config, flatten
from paceline.data.blend import Blend
from paceline.world.group import Group

# Fields that may differ between hosts, beside [track], which only rank 0 uses: where and how a run is computed.
_LOCAL = (
    *("parallel.interface", "parallel.threads", "parallel.port", "parallel.device"),
    *("data.path", "data.mix", "train.init-from"),
)


def require_alike(group: Group, config: Config, blend: Blend) -> None:
    """Raises UserError on all ranks, naming them and their values, if data or configs differ. Collective."""
    mine = {
        "data": f"{blend.name} {blend.fingerprint[:16]}",
        "data content (paceline data info DIR --verify says which shard)": blend.content_digest[:16],
        **{
            name: value
            for name, value in flatten(config).items()
            if name not in _LOCAL and not name.startswith("track.")
        },
    }
    rows, differences = group.share_json(mine), []
    for name in dict.fromkeys(name for row in rows for name in row):
        ranks_by_value: dict[str, list[str]] = {}
        for rank, row in enumerate(rows):
            ranks_by_value.setdefault(json.dumps(row.get(name, "not there")), []).append(str(rank))
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
            differences.append(f"{name}: {values}")
    if differences:
        text = ". ".join(differences)
        raise UserError(f"ranks differ, and would train different models: {text}. Make them equal", reach="world")
