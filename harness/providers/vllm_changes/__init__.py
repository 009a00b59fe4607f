"""What vLLM answers where it is known to depart from the reference: one function a departure.

Each takes the reference's object and returns one that departs in this way alone, stated independently of vLLM's code.
"""
