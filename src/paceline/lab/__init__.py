"""Several hosts on one machine (Linux, root), each with a link, a share of the processors and a name of its own.

A host is a process: the first one of namespaces that were made with it (network, processes, mounts, name), so that the
kernel takes everything of a host away when that process ends, however it ends. They hang on a bridge in one more
network namespace; nothing of this machine's own network is touched.

hosts.py        what is asked for: names, addresses, rates, shares, cores
network.py      the bridge, the links, their rates
processors.py   shares of the processors, as cgroups
inside.py       the first process of a host: makes it, starts its ranks, tells how they end
running.py      the lab from its first process to its last
state.py        one lab at a time; what a killed one left
change.py       what happens to a lab that runs: a rate, a cut, a share, a host without power
system.py       the system's own tools, and what is missing where they fail
"""
