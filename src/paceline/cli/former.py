"""Options and verbs that earlier versions had: what to do instead. Each is refused with this text for one version."""

_BY_LAUNCH = "one terminal starts all hosts: paceline launch --hosts a:2,b:2 -- train ... (or torchrun on each)"
_DIFFERENT = "replicas that differ end the run, which continues from its newest checkpoint: leave it out"
_NO_PLOT = "--json has its numbers: leave it out"

FORMER = {
    **{
        f"{verb} {flag}": _BY_LAUNCH
        for verb in ("train", "resume")
        for flag in ("--hosts", "--min-hosts", "--node-rank")
    },
    **{
        f"{verb} --parallel.repair": _DIFFERENT
        for verb in ("train", "resume", "plan", "doctor", "verify", "bench link", "bench scaling")
    },
    **{f"{verb} --plot": _NO_PLOT for verb in ("plan", "bench link", "bench scaling")},
    "data prepare --dedup": "remove duplicates before, for example by datatrove",
    "launch --port": "no launcher listens any more, and --parallel.port is that of the ranks' store: leave it out",
    "lab set --cpu": "start the lab with another --cpu",
    "lab set --kill": "kill -9 the host's `unshare`, the parent of its pid in /run/paceline-lab/state.json",
    "bench loader": "it is a script in a checkout: python bench/loader.py",
}
