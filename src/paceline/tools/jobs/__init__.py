"""Jobs for clusters: the files with which a scheduler starts `paceline train`."""
