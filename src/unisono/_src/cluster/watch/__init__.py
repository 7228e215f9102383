"""Notices the process that is lost: killed, stopped, stuck, ended or ended by an error, and says so in all others."""
