"""Checks that read the user's code.

They refuse, or warn of, what would silently train something else.
"""
