"""Draws cases that no suite has, puts them to a backend, makes what fails small, and writes it down."""
