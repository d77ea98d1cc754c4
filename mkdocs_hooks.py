"""What the site needs beyond the pages under docs/: CHANGELOG.md and CONTRIBUTING.md, and links into the repository.

A link from a page to a file outside of docs/ works in the repository and has no target on the site, and no public
address of the repository is known here. It becomes the file's name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}


def on_files(files: Files, config: Any) -> Files:
    """Two pages more, as if they lay in docs/."""
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](").replace("](LICENSE)", "](../LICENSE)")
        files.append(File.generated(config, _BESIDE[name], content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ become what they point to."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def replace(found: re.Match[str]) -> str:
        text, target, fragment = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        there = (here / target).resolve()
        if there.is_relative_to(ROOT / "docs"):
            return found[0] if there.suffix == ".md" or there.is_file() else text
        name = there.relative_to(ROOT).as_posix()
        if name in _BESIDE:
            up = "../" * (len(Path(page.file.src_uri).parts) - 1)
            return f"[{text}]({up}{_BESIDE[name]}{fragment})"
        return text if text.strip("`") == name else f"{text} (`{name}` in the repository)"

    parts = _FENCE.split(markdown)  # what is in fences is a program's text
    return "".join(part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts))


def on_page_content(html: str, **_: Any) -> str:
    """The docstrings mark their examples with ``::``, which Markdown does not know."""
    return re.sub(r"<p>::</p>\s*", "", html).replace("::</p>", ":</p>")
