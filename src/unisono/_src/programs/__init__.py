"""Traced programs: inlined, replaced, marked and digested. Nothing here knows of Keras or of a step."""
