"""A run: which questions go to whom, in which process, and what becomes of the answers."""
