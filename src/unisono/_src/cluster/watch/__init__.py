"""The watch: notices a process that is killed, stopped, stuck, ended or ended by an error, and says so in all others."""
