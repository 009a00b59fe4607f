"""The checks, one module each; each docstring ends with what the check cannot see."""
