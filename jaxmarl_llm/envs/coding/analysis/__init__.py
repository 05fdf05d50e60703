"""What a program text says without running it: its syntax, calls, data flow and values."""
