"""The right answer to a problem, how far from it one may be, and what wrong answers look like."""
