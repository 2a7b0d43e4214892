"""Settings of the records, and of where they are sent."""

from dataclasses import dataclass

from paceline.base.errors import UserError, nearest, require_at_least


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Log lines and metrics rows."""

    every: int = 1
    """Steps per row of metrics.jsonl. The terminal shows a line every few seconds in any case."""
    ranks_every: int = 100
    """Steps per row of ranks.jsonl, which has each rank's times in a world of more than 8 ranks."""

    def check(self) -> None:
        """Raises UserError for an impossible value."""
        require_at_least(self, "log.", every=1, ranks_every=1)


TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "prometheus")


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Trackers that get the run's records, by a process that training never waits for."""

    to: str = ""
    """Send rows and events to tensorboard, wandb, trackio, mlflow, prometheus: one or several, with commas."""
    project: str = ""
    """Project or experiment; empty: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, or paceline."""
    name: str = ""
    """Name of the run in the tracker; empty: WANDB_NAME, or the run folder's."""
    prometheus_port: int = 9464
    """With prometheus: serve http://127.0.0.1:PORT/metrics; 0: no server."""
    prometheus_file: str = ""
    """With prometheus: write this file, too, for node_exporter's textfile collector; its name ends in .prom."""

    @property
    def trackers(self) -> list[str]:
        """The names in `to`, each once."""
        return list(dict.fromkeys(name for word in self.to.split(",") if (name := word.strip())))

    def check(self) -> None:
        """Raises UserError for an impossible value."""
        for name in self.trackers:
            if name not in TRACKERS:
                raise UserError(
                    f"there is no tracker '{name}'{nearest(name, TRACKERS)}; there are: {', '.join(TRACKERS)}"
                )
        if not 0 <= self.prometheus_port <= 65535:
            raise UserError(f"the port for Prometheus is {self.prometheus_port}; it must be between 1 and 65535, or 0")
        if self.prometheus_file and not self.prometheus_file.endswith(".prom"):
            raise UserError(f"the file for Prometheus is {self.prometheus_file}; node_exporter reads only *.prom")
