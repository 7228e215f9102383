"""Several processes: the description of a cluster, the launcher of a program in several processes on this machine, and the watch that
names a lost process."""
