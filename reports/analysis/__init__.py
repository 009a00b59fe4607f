"""What records come to: counted, grouped and put into words, for every format."""
