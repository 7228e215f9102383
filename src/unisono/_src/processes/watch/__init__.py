"""The watch: notices a lost process, and names it in all others.

A process is lost if it is killed, stopped, stuck, at its end, or ended by an error.
"""
