"""What the command says to the shell."""

FINE = 0
FOUND = 1
"""Differences or problems were found."""
USAGE = 2
"""The command line is wrong, or something cannot be read or written."""
INTERRUPTED = 130
"""As shells say of a process that SIGINT ended."""
BROKEN_PIPE = 141
"""As shells say of a process that SIGPIPE ended."""
