"""Cut a step into phases.

From its traces for the whole batch and for a shard follows what shards compute, what is merged, and what comes after. The trace
for all rows says what is to be computed. The trace for the rows of a shard says how an equation on rows looks there. A reduction
over rows is a merge: parts are added in the order of the tree, and the result is the same everywhere. An equation without a rule
gathers the rows that it reads. So no number has to be recognised as a sum or a mean, and an unknown equation costs time, never a
wrong number.
"""
