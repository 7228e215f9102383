"""`unisono launch`: one program in several processes on this machine."""
