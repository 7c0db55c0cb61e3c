"""The ranks that take part: groups, launchers, waiting, and what goes over the wire."""
