"""Which folders an environment can test.

torch_xla and the trainers need one each: `make test-xla`, `make test-integrations`.
"""

from __future__ import annotations

from importlib.util import find_spec

NEEDS = {"xla": "torch_xla", "integrations": "lightning"}

collect_ignore = [folder for folder, package in NEEDS.items() if not find_spec(package)]
