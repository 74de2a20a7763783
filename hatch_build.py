"""The README for a package index, where paths of the repository lead nowhere: no pictures, no links to files."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE = r"```.*?```|`[^`\n]*`"
PICTURE = r"!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>"
FILE_LINK = r"\[(?P<text>[^\]]*)\]\((?!https?:|mailto:|#)[^)]*\)"
PARTS = re.compile(rf"(?P<code>{CODE})|\[?(?:{PICTURE})(?:\]\([^)]*\))?|{FILE_LINK}", re.DOTALL)


def for_package_index(markdown: str) -> str:
    """Return the text without pictures, and with the words of links to files in place of those links."""
    text = PARTS.sub(lambda part: part["code"] or part["text"] or "", markdown)
    return re.sub(r"\n{3,}", "\n\n", text)


class ReadmeHook(MetadataHookInterface):
    """Sets the project's `readme` when the package is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md and set the field."""
        markdown = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_package_index(markdown)}
