"""Which folders an environment can test: torch_xla needs one of its own (`make test-xla`)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch_xla") else ["xla"]
