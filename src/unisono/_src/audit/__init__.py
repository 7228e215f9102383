"""The audit: a script is run on several placements, and the first difference of their records is explained."""
