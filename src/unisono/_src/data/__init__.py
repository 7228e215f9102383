"""Rows: their order, and which replica gets them."""
