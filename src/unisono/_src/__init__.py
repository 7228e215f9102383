"""Everything that is not public: rooms in floors, which `docs/architecture.md` draws."""
