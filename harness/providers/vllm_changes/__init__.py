"""The answers of vLLM where it is known to depart from the reference: one function for each departure.

Each takes the reference's object and returns one with this departure alone, implemented independently of vLLM's code.
"""
