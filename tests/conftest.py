"""Which folders an environment can test.

torch_xla, the trainers and the site need one each: `make test-xla`, `make test-integrations`,
`make test-docs`.
"""

from __future__ import annotations

from importlib.util import find_spec

NEEDS = {"xla": "torch_xla", "integrations": "lightning", "docs/site": "sphinx"}

collect_ignore = [folder for folder, package in NEEDS.items() if not find_spec(package)]
