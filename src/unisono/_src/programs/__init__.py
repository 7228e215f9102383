"""Traced programs: walked, cut, evaluated, replaced and digested. Nothing here knows of Keras or of a step."""
