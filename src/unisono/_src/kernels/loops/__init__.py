"""Loops: recurrent layers as one kernel, and what need not be in a loop."""
