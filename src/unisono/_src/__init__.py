"""Everything that is not public. `docs/architecture.md` draws its packages and rooms."""
