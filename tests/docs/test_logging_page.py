"""What docs/logging.md shows is so: its code runs, and OpenTelemetry has the figures."""

from __future__ import annotations

import logging
import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "logging.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, Any] = {}
    logger = logging.getLogger("xckpt")
    try:
        with chdir(tmp_path):
            for code in BLOCKS:
                exec(compile(code, "docs/logging.md", "exec"), names)
    finally:
        logger.setLevel(logging.NOTSET)
    assert "save logged: rank 0 of 1 wrote 1.00 MiB in" in caplog.text
    (scope,) = names["reader"].get_metrics_data().resource_metrics[0].scope_metrics
    points = {metric.name: metric.data.data_points for metric in scope.metrics}
    assert {point.attributes["operation"] for point in points["checkpoint.bytes"]} == {
        "save",
        "load",
    }
    assert all(point.value == 1 << 20 for point in points["checkpoint.bytes"])
    assert all(0 < point.sum < 60 for point in points["checkpoint.duration"])
