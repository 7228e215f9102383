"""Replays of a recorded run. The state before a step is rebuilt, and the step is inspected."""
