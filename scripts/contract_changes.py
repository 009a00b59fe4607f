"""Print how vLLM's backend contract differs between two versions, as entries of ``backends/contract_changes.yaml``.

``python scripts/contract_changes.py OLD/vllm/v1/attention/backend.py NEW/vllm/v1/attention/backend.py``. It compares
fields, signatures, decorators and docstrings of the classes in the two files. Bodies and comments are not compared. The
key ``do`` is a draft: read the change, and write what a class must do.
"""

import ast
import sys
from pathlib import Path

import yaml

DRAFTS = {
    "added": "Nothing, unless the class offers it.",
    "removed": "Delete it: vLLM does not call it any more.",
    "changed": "Take the new signature.",
    "described": "Read the new description.",
}


def members(file: str) -> dict[str, tuple[str, str]]:
    """Return the signature and the docstring of each field and method, by ``Class.name``."""
    found = {}
    for owner in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        for each in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(each, ast.FunctionDef):
                marks = "".join(f"@{ast.unparse(mark)} " for mark in each.decorator_list)
                result = f" -> {ast.unparse(each.returns)}" if each.returns else ""
                text = f"{marks}({ast.unparse(each.args)}){result}"
                found[f"{owner.name}.{each.name}"] = (text, ast.get_docstring(each) or "")
            elif isinstance(each, ast.AnnAssign):
                value = f" = {ast.unparse(each.value)}" if each.value else ""
                found[f"{owner.name}.{ast.unparse(each.target)}"] = (f"{ast.unparse(each.annotation)}{value}", "")
            elif isinstance(each, ast.Assign):
                found[f"{owner.name}.{ast.unparse(each.targets[0])}"] = (ast.unparse(each.value), "")
    return found


def changes(old: str, new: str) -> list[dict[str, str]]:
    """Return an entry for each member that differs."""
    before, after = members(old), members(new)
    entries = []
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        kind = "added" if was is None else "removed" if now is None else "changed"
        if was and now and was[0] == now[0]:
            kind = "described"
        texts = {key: text for key, text in (("was", was and was[0]), ("now", now and now[0])) if text}
        entries.append({"member": name, "change": kind, **texts, "do": DRAFTS[kind]})
    return entries


if __name__ == "__main__":
    print(yaml.safe_dump(changes(*sys.argv[1:3]), sort_keys=False, width=110))
