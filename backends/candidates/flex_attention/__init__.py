"""Candidate ``flex_attention``: torch's function of that name over gathered pages. Begin with ``backend``."""
