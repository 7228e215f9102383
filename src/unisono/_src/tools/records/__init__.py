"""Record files: read, and compared."""
