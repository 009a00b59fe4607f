"""A static site from any number of run files: which backend was measured right for a need, on which device."""
