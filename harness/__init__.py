"""The examination: builds problems, drives backends, runs checks. Knows every other room; none of them knows it."""
