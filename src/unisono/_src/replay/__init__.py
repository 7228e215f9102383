"""Replays of a recorded run: the state before a step is rebuilt, and the step is looked into."""
