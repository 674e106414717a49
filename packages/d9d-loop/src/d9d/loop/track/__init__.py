"""Where the numbers of a run go: JSON lines, a progress line, and what a third party adds."""
