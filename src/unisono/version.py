"""Which Unisono this is."""

VERSION = "0.1.0"
