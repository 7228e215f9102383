"""Many processes: where the description of a cluster comes from, how a program is started in several processes on this machine,
and the watch that names the process which is lost."""
