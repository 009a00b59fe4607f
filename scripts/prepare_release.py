"""Check that a tag is the version to release, and write the address of the repository into the metadata.

    python scripts/prepare_release.py TAG ADDRESS

The checkout does not know its address, and on a package index links to files of the repository would be broken. So
`pyproject.toml` gets its links, and relative links of `README.md` become absolute, for the files of TAG. Exits with a
message if TAG is not the version, or if `CHANGELOG.md` does not have its date. attncheck-release.yml runs it.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
"""A link or an image of Markdown whose target is a file of the repository."""


def problem_of(tag: str, version: str, changelog: str) -> str:
    """Return why ``tag`` cannot be released, or ""."""
    if tag != f"v{version}":
        return f"the tag is {tag}, and pyproject.toml has version {version}: the tag must be v{version}"
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        return f"CHANGELOG.md has no line `## {version} - YEAR-MONTH-DAY`"
    return ""


def with_urls(project: str, address: str) -> str:
    """Return the text of `pyproject.toml` with the links that an index shows."""
    urls = {
        "Documentation": f"{address}/tree/HEAD/docs",
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return project.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n", 1)


def with_absolute_links(readme: str, address: str, tag: str) -> str:
    """Return the text of `README.md` with absolute links; an image is linked as its raw file."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({address}/{kind}/{tag}/{link[3]})"

    return _LINK.sub(absolute, readme)


def main() -> None:
    """Check TAG, and change the two files of the checkout."""
    tag, address = sys.argv[1:3]
    project, readme = ROOT / "pyproject.toml", ROOT / "README.md"
    text = project.read_text(encoding="utf-8")
    version = tomllib.loads(text)["project"]["version"]
    if problem := problem_of(tag, version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        sys.exit(problem)
    project.write_text(with_urls(text, address), encoding="utf-8")
    readme.write_text(with_absolute_links(readme.read_text(encoding="utf-8"), address, tag), encoding="utf-8")
    print(f"{tag} of {address}")


if __name__ == "__main__":
    main()
