"""What `paceline plan` predicts for runs that others published, to which nothing was fitted: one table of efficiencies
(src/paceline/tools/plan/devices.toml) serves all rows. `python bench/plan_published.py` prints predicted, published and
the difference; docs/LOG.md has the result.

What paceline does not have is left out of a prediction: tensor and pipeline parallelism, selective recomputation (none
is assumed), sliding attention windows, value embeddings.
"""

import statistics
from dataclasses import dataclass
from typing import Literal

from paceline.config import Config
from paceline.model.config import ModelConfig
from paceline.optim.config import OptimConfig
from paceline.record.console import Console, table
from paceline.tools.plan import devices
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.plan import plan

MOSAIC = "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
TITAN = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
KEMPNER = (
    "kempnerinstitute.github.io/KempnerForge/reference/benchmarks.html"  # micro-batches are not given: 4 is assumed
)
RELIABILITY = "arXiv 2407.21783, table 5 and section 3.3.4"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published speed in tokens/s of one GPU."""

    name: str
    shape: tuple[int, int, int, int, int]  # layers, width, heads, sequence length, vocabulary
    gpus: int
    device: str
    micro: int  # sequences
    passes: int
    published: float
    source: str
    arch: Literal["gpt2", "llama"] = "gpt2"
    strategy: Literal["ddp", "zero", "fsdp"] = "fsdp"
    kv_heads: int = 0
    hidden: int = 0
    compiled: bool = False
    recomputes: bool = False
    muon: bool = False
    gbit: float = 3200.0  # between hosts, of a host with 8 GPUs

    def predicted(self) -> float:
        layers, width, heads, seq_len, vocab = self.shape
        config = Config(
            model=ModelConfig(
                arch=self.arch, n_layer=layers, n_embd=width, n_head=heads, n_positions=seq_len, vocab_size=vocab,
                n_kv_head=self.kv_heads, n_hidden=self.hidden,
            ),
            optim=OptimConfig(name="muon" if self.muon else "adamw"),
        )  # fmt: skip
        sizes = {"global_batch_size": self.gpus * self.micro * self.passes, "device_batch_size": self.micro}
        how = {"compile": self.compiled, "activation_checkpoint": self.recomputes}
        config = config.replace("train", steps=1000, eval_every=-1, **sizes, **how).replace("data", seq_len=seq_len)
        config = config.replace("parallel", strategy=self.strategy)
        hosts = max(1, self.gpus // 8)
        cluster = Cluster(device=self.device, hosts=hosts, ranks_per_host=self.gpus // hosts, link_gbit=self.gbit)
        found = plan(config, cluster, devices.gpu(self.device, compiled=self.compiled))
        return found.tokens_per_s / self.gpus


MPT_1B, MPT_3B, MPT_7B = (24, 2048, 16, 2048, 50368), (32, 2560, 20, 2048, 50368), (32, 4096, 32, 2048, 50368)
LLAMA_8B = {"arch": "llama", "kv_heads": 8, "hidden": 14336}
ROWS = (
    Row(name="nanoGPT 124M", shape=(12, 768, 12, 1024, 50304), gpus=8, device="A100-40GB", micro=12, passes=5,
        strategy="ddp", compiled=True, published=874e3 / 8, source="github.com/karpathy/nanoGPT/issues/110"),
    Row(name="llm.c 124M", shape=(12, 768, 12, 1024, 50304), gpus=8, device="A100-80GB", micro=64, passes=1,
        strategy="zero", compiled=True, published=10e9 / 5400 / 8, source="github.com/karpathy/llm.c/discussions/481"),
    Row(name="llm.c 124M", shape=(12, 768, 12, 1024, 50304), gpus=8, device="H100", micro=64, passes=1,
        strategy="zero", compiled=True, published=524288 / 0.140 / 8,
        source="github.com/KellerJordan/modded-nanogpt, records/track_1_short/2024-10-13_llmc"),
    Row(name="nanochat d24", shape=(24, 1536, 12, 2048, 32768), gpus=8, device="H100", micro=16, passes=2,
        arch="llama", strategy="zero", compiled=True, muon=True, published=800e3 / 8,
        source="github.com/karpathy/nanochat, dev/LEADERBOARD.md, run 1"),
    Row(name="nanochat d26", shape=(26, 1664, 13, 2048, 32768), gpus=8, device="H100", micro=16, passes=2,
        arch="llama", strategy="zero", compiled=True, muon=True, published=630e3 / 8,
        source="github.com/karpathy/nanochat, dev/LOG.md, 2026-02-02"),
    Row(name="MPT 125M", shape=(12, 768, 12, 2048, 50368), gpus=8, device="A100-80GB", micro=32, passes=2,
        published=141737, source=MOSAIC),
    Row(name="MPT 1B", shape=MPT_1B, gpus=8, device="A100-80GB", micro=14, passes=4, published=20513, source=MOSAIC),
    Row(name="MPT 3B", shape=MPT_3B, gpus=8, device="A100-80GB", micro=10, passes=2, published=10811, source=MOSAIC),
    Row(name="MPT 7B", shape=MPT_7B, gpus=8, device="A100-80GB", micro=6, passes=2, published=4641, source=MOSAIC),
    Row(name="MPT 7B", shape=MPT_7B, gpus=128, device="A100-40GB", micro=18, passes=1, recomputes=True, gbit=1600,
        published=3623, source=MOSAIC),
    Row(name="MPT 1B", shape=MPT_1B, gpus=8, device="H100", micro=14, passes=1, published=45455, source=MOSAIC),
    Row(name="MPT 1B", shape=MPT_1B, gpus=64, device="H100", micro=20, passes=1, published=44402, source=MOSAIC),
    Row(name="MPT 3B", shape=MPT_3B, gpus=64, device="H100", micro=6, passes=3, published=22525, source=MOSAIC),
    Row(name="MPT 7B", shape=MPT_7B, gpus=8, device="H100", micro=6, passes=1, published=10643, source=MOSAIC),
    Row(name="MPT 13B", shape=(40, 5120, 40, 2048, 50368), gpus=64, device="H100", micro=2, passes=1,
        published=4800, source=MOSAIC),
    Row(name="Llama 8B", shape=(32, 4096, 32, 8192, 128256), gpus=8, device="H100", micro=2, passes=1,
        compiled=True, published=6667, source=TITAN, **LLAMA_8B),
    Row(name="Llama 8B", shape=(32, 4096, 32, 8192, 128256), gpus=128, device="H100", micro=2, passes=1,
        compiled=True, published=6514, source=TITAN, **LLAMA_8B),
    Row(name="Llama 8B, eager", shape=(32, 4096, 32, 8192, 128256), gpus=128, device="H100", micro=2, passes=1,
        published=5605, source=TITAN, **LLAMA_8B),
    Row(name="Llama 7B", shape=(32, 4096, 32, 4096, 32000), gpus=1, device="H200", micro=4, passes=1, arch="llama",
        hidden=11008, recomputes=True, compiled=True, published=10471, source=KEMPNER),
    Row(name="Llama 7B", shape=(32, 4096, 32, 4096, 32000), gpus=4, device="H200", micro=4, passes=1, arch="llama",
        hidden=11008, recomputes=True, compiled=True, published=38983 / 4, source=KEMPNER),
)  # fmt: skip
# Interruptions in so many days of so many GPUs: predicted from the failures of another cluster (devices.toml).
FAILURES = (
    ("Llama 3 405B, 16,384 H100, 54 days", 16384, 54, 419, RELIABILITY),
    ("OPT-175B, 992 A100, 56 days", 992, 56, 54, "the OPT-175B logbook (arXiv 2205.01068: at least 35 by hand)"),
)


def main() -> None:
    cells, errors = [], []
    for row in ROWS:
        predicted = row.predicted()
        errors.append(predicted / row.published - 1)
        where = f"{row.name}, {row.gpus} x {row.device}"
        cells.append([where, f"{predicted:,.0f}", f"{row.published:,.0f}", f"{errors[-1]:+.0%}", row.source])
    console = Console(0)
    console.say(table("tokens/s of a GPU", ["run", "predicted", "published", "difference", "source"], cells))
    sizes = sorted(map(abs, errors))
    console.say(f"{len(errors)} rows: median of |difference| {statistics.median(sizes):.0%}, worst {sizes[-1]:.0%}\n")
    hours = devices.gpu("H100", compiled=True).mtbf_hours
    cells = [
        [name, f"{gpus * days * 24 / hours:.0f}", str(known), f"{gpus * days * 24 / hours / known - 1:+.0%}", source]
        for name, gpus, days, known, source in FAILURES
    ]
    console.say(table("interruptions", ["run", "predicted", "published", "difference", "source"], cells))


if __name__ == "__main__":
    main()
