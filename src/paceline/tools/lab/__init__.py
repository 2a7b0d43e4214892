"""Several hosts on one machine (Linux, root), each with its own link, share of the processors and name.

A host is the first process of new namespaces (network, processes, mounts, name), so that the kernel removes the host
when that process ends in any way. A bridge in another network namespace connects the hosts; this machine's own network
does not change.

hosts.py        the layout: names, addresses, rates, shares, cores
network.py      the bridge, the links, their rates
processors.py   shares of the processors, as cgroups
inside.py       the first process of a host: makes it, starts its ranks, reports their end
running.py      the lab from its first process to its last
state.py        one lab at a time; removes what a killed one left
change.py       changes of a running lab: rate, cable
system.py       calls of the system's tools, and their errors
"""
