"""The marks: the format of records, the store of runs, and how they are told to people. Loads no torch."""
