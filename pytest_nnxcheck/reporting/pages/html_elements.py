"""Elements of HTML: text gets into one, or into an attribute, through `tag` alone, which escapes it."""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = ("input", "wbr")
"""Elements that have no content, and no end."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *content: object, **attributes: object) -> Html:
    """``<name>``, with content and attributes escaped: ``class_`` is ``class``, ``aria_label`` ``aria-label``; one that is `False` is left out."""
    written = [
        f" {key.strip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not False
    ]
    start = Html(f"<{name}{''.join(written)}>")
    return start if name in VOID else Html(f"{start}{joined(*content)}</{name}>")


def joined(*content: object) -> Html:
    """Elements one after the other, lists of them among them; all else is text."""
    return Html("".join(map(_html, content)))


def _html(part: object) -> str:
    if isinstance(part, Html):
        return part
    if isinstance(part, Iterable) and not isinstance(part, str):
        return joined(*part)
    return html.escape(str(part))
