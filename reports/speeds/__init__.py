"""Latencies put together over rounds, and told: tables, their summary, and what to know about them."""
