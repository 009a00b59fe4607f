"""What attncheck's own candidates share."""
