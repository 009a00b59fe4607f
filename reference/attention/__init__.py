"""Attention, pure torch, float64 unless told otherwise."""
