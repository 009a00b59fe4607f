"""Driving a backend through the contract, as a model runner does, and seeing what it did."""
