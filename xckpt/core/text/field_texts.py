"""The texts below the fields of a class, from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap


def texts_of(owner: type) -> dict[str, str]:
    """Field -> the text below it, of the fields that have one; none where there is no source.

    Example:
        >>> from xckpt.options import LoadOptions
        >>> texts_of(LoadOptions)["host"]
        "The name of this rank's host, where it is not found: ranks of one name share memory."
    """
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (OSError, TypeError, SyntaxError):  # as in a frozen program
        return {}
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for pair in zip(tree.body, tree.body[1:], strict=False):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
            case _:
                pass
    return texts
