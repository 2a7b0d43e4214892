"""The plot of `paceline bench link`: bus bandwidth over size, one line a collective.

plotly comes with the `report` extra.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base import units
from paceline.base.errors import UserError

if TYPE_CHECKING:
    from paceline.bench.link import LinkReport


def check_plot(path: Path) -> None:
    """Raises UserError where no plot could be written to this path."""
    if path.suffix != ".html":
        raise UserError(f"--plot {path}: a plot is a page; give it a name that ends in .html")
    if importlib.util.find_spec("plotly") is None:
        raise UserError("--plot needs plotly; pip install 'paceline[report]'")


def write_plot(report: "LinkReport", path: Path) -> None:
    """Writes one page that needs no network. Raises UserError where it cannot be written."""
    from plotly import graph_objects as go  # type: ignore[import-untyped, unused-ignore]

    figure = go.Figure()
    for found in report.collectives:
        sizes = [time.num_bytes for time in found.times]
        rates = [time.bus_bytes_per_s / 1e6 for time in found.times]
        hover = "%{x} bytes: %{y:.1f} MB/s<extra>" + found.name + "</extra>"
        figure.add_scatter(x=sizes, y=rates, mode="lines+markers", name=found.name, hovertemplate=hover)
    link = report.slowest.link_bytes_per_s / 1e6
    every = sorted({time.num_bytes for found in report.collectives for time in found.times})
    name = f"the link: {link:.1f} MB/s"
    ends = [every[0], every[-1]]
    figure.add_scatter(x=ends, y=[link, link], mode="lines", name=name, line={"dash": "dash", "color": "gray"})
    ticks = {"tickvals": every, "ticktext": [units.size(num_bytes) for num_bytes in every]}
    figure.update_xaxes(type="log", title="size of the buffer", **ticks)
    figure.update_yaxes(type="log", title="bus bandwidth, MB/s of payload", dtick=1)
    hosts = len(report.hosts)
    where = f"{report.world_size} ranks on {hosts} host{'s'[: hosts > 1]}, {report.backend}"
    figure.update_layout(title=f"Collectives, {where}", template="plotly_white", legend={"orientation": "h", "y": -0.2})
    try:
        figure.write_html(path, include_plotlyjs=True)
    except OSError as error:
        raise UserError(f"cannot write the plot {path}: {error.strerror}") from None
