"""Everything that is not public. `docs/architecture.md` draws its rooms and floors."""
