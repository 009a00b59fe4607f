"""The run file: typed records, one a line, and the store that writes and reads them."""
