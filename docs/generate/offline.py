"""A hook of MkDocs: the one script that the theme would fetch comes with the site."""

from __future__ import annotations

from typing import Any

FETCHED = "https://unpkg.com/iframe-worker/shim"
OURS = "assets/iframe-worker.js"


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Point a finished page at our copy."""
    return output.replace(FETCHED, "../" * page.url.count("/") + OURS)


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """The same for pages that are no Markdown, such as 404.html."""
    return output.replace(FETCHED, OURS)
