"""The check ``builder``: what a metadata builder changes, what it shares, and where it waits for the device."""
