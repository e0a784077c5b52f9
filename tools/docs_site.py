"""Completes the pages of the documentation site: adds the table of metadata keys, and replaces links by paths.

MkDocs calls :func:`on_page_markdown` for each page (``hooks`` of mkdocs.yml).
"""

from __future__ import annotations

import re
from typing import Any

from stream_assets.metadata_keys import METADATA_KEYS

METADATA = "<!-- metadata keys -->"
# A link to a file that is in the repository and not on the site.
OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Complete the source of a page."""
    return OUTSIDE.sub(_path, markdown.replace(METADATA, _metadata()))


def _path(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"


def _metadata() -> str:
    tables = []
    for heading, keys in METADATA_KEYS.items():
        rows = "\n".join(f"| `{key.key}` | {key.meaning} |" for key in keys)
        tables.append(f"### {heading}\n\n| key | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(tables)
