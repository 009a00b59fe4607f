"""Examination of the functions a backend offers beside attention: merging states, short convolution, block moves."""
