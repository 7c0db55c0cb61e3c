"""One HTML file of a page: the template, the style, the scripts and the JSON, nothing else.

1. The scripts of `files` are one module, in the order of `SCRIPTS`; they need no build.
2. The JSON lies in a script element that is not run. Characters that could end it, or begin a
   comment in it, are escaped (`escaped_json`).
3. A Content-Security-Policy allows this very style and these very scripts by their digests, and
   no request but, from a served page, one to its own server.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from html import escape
from importlib.resources import files
from typing import Final

from xckpt.viewer.model import Page, as_json

SCRIPTS: Final = (
    *("elements.js", "checkpoint.js", "geometry.js", "rows.js", "picture.js", "values.js"),
    *("overview.js", "leaf.js", "plan.js", "run.js", "diff.js", "keys.js", "main.js"),
)
"""The scripts, in this order in one scope."""

_ESCAPED: Final = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def page_html(page: Page) -> str:
    """The HTML of a page, which stands alone.

    Example:
        >>> html = page_html(Page("</script><b>", "ckpt"))
        >>> html.startswith("<!doctype html>"), "</script><b>" in html
        (True, False)
    """
    parts = {
        "policy": escape(policy(served=page.served)),
        "style": _style(),
        "script": _script(),
        "title": escape(page.title),
        "page": escaped_json(as_json(page).decode()),
    }
    # In one pass: a placeholder inside a title stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _file("page.html"))


def escaped_json(text: str) -> str:
    """A JSON document as a script element may hold it; it means the same.

    Example:
        >>> print(escaped_json('["</script>", "<!--", "&"]'))
        ["\\u003c/script\\u003e", "\\u003c!--", "\\u0026"]
    """
    return text.translate(_ESCAPED)


@functools.cache
def policy(*, served: bool) -> str:
    """The Content-Security-Policy of a page.

    Args:
        served: whether it may ask its own server.
    """
    sources = {
        "default-src": "'none'",
        "script-src": _digest(_script()),
        "style-src": _digest(_style()),
        "img-src": "data: blob:",
        "connect-src": "'self'" if served else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in sources.items())


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def _script() -> str:
    return '"use strict";\n' + "\n".join(map(_file, SCRIPTS))


@functools.cache
def _style() -> str:
    return _file("style.css")


@functools.cache
def _file(name: str) -> str:
    return files("xckpt.viewer").joinpath("files", name).read_text(encoding="utf-8")
