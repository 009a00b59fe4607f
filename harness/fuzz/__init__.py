"""Draws cases that no suite has, examines a backend with them, and shrinks failing cases and writes them to files."""
