"""The audit of a script on several placements. The first difference of the runs' records is explained."""
