"""The metadata utilities of vLLM, under their names."""
