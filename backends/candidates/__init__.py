"""The candidates that attncheck brings along, one module or folder each."""
