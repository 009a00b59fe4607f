"""``attncheck new backend``: writes a small correct backend and its test, as a start. Loads no torch and no backend.

The files are templates of ``harness/cli/templates`` with the name filled in.
"""

import keyword
import re
import shlex
from enum import StrEnum
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from attncheck.errors import QuestionError, unwritable


class BackendKind(StrEnum):
    """Form of the backend."""

    FUNCTION = "function"
    CLASSES = "classes"
    VLLM = "vllm"


TEMPLATES = {BackendKind.FUNCTION: "function.py", BackendKind.CLASSES: "classes.py", BackendKind.VLLM: "vllm_class.py"}


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the module.")],
    kind: Annotated[
        BackendKind,
        typer.Option(help="One function, classes of attncheck's contract, or a class of the installed vLLM."),
    ] = BackendKind.FUNCTION,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write into.")] = Path(),
) -> int:
    """Write a small correct backend, NAME.py, and its test, test_NAME.py.

    Replace the kernel in NAME.py by your own. Existing files are not overwritten.
    """
    from attncheck.backends.registry import INSTALL_VLLM

    texts = template_files(kind, name)
    paths = [output / file for file in texts]
    if there := [str(path) for path in paths if path.exists()]:
        raise QuestionError(f"{' and '.join(there)}: there already; nothing was written")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        raise unwritable(f"--output {output}: {error.filename}", error) from error
    typer.echo(f"written: {', '.join(map(str, paths))}")
    typer.echo(f"  {shlex.join(['attncheck', 'run', '--backend', backend_ref(kind, name, output)])}")
    typer.echo(f"  {shlex.join(['pytest', str(paths[1])])}")
    if kind == BackendKind.VLLM and find_spec("vllm") is None:
        typer.echo(f"vLLM is not installed here: {INSTALL_VLLM}, or import attncheck.backends.contract in its place")
    return 0


def backend_ref(kind: BackendKind, name: str, folder: Path) -> str:
    """Return the argument of ``--backend`` for a backend written into ``folder``."""
    place = folder / f"{name}.py"
    typed = place if place.parent.name else f"./{place}"
    return f"{'vllm:' if kind == BackendKind.VLLM else ''}{typed}:{_class_name(name)}"


def template_files(kind: BackendKind, name: str) -> dict[str, str]:
    """Return two files by name: the backend of ``kind`` called ``name``, and its test.

    Raises:
        QuestionError: ``name`` is not a valid module name, is taken, or would hide an installed module.
    """
    template, test = (_template(file) for file in (TEMPLATES[kind], "examined.py"))
    if kind == BackendKind.VLLM:
        test = test.replace('f"{', 'f"vllm:{')
    if reason := _name_reason(name, template):
        raise QuestionError(f"a backend cannot be called {name!r}: {reason}")
    return {f"{name}.py": _named(template, name), f"test_{name}.py": _named(test, name)}


def _template(file: str) -> str:
    return (files("attncheck.harness.cli") / "templates" / file).read_text(encoding="utf-8")


def _named(template: str, name: str) -> str:
    """Return the template, which is for a backend called ``mine``, for the backend ``name``."""
    words = {"mine": name, "Mine": _class_name(name), "MINE": name.upper()}
    return re.sub(r"(?<![A-Za-z0-9])(mine|Mine|MINE)(?![A-Za-z0-9])", lambda match: words[match[1]], template)


def _class_name(name: str) -> str:
    """Return the class name for a module name: ``MyKernel`` for ``my_kernel``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _name_reason(name: str, template: str) -> str:
    """Return why ``name`` cannot be used; empty if it can."""
    from attncheck.backends.registry import known_names

    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        return "it names a Python module, of letters, digits and underscores, a letter first"
    if keyword.iskeyword(name) or keyword.iskeyword(_class_name(name)):
        return "it is a word of Python's"
    if name in known_names():
        return f"that is a registered backend; taken are {', '.join(known_names())}"
    if _class_name(name) != "Mine" and re.search(rf"\b{_class_name(name)}\b", template):
        return f"its class would be called {_class_name(name)}, as another name in the file"
    if _is_installed(name):
        return f"{name}.py would hide an installed module of that name"
    return ""


def _is_installed(name: str) -> bool:
    """Return whether ``import name`` finds a module outside the current folder, which ``python -m`` searches too."""
    if (spec := find_spec(name)) is None:
        return False
    places = (spec.origin, *(spec.submodule_search_locations or ()))
    return all(Path(place).parent != Path.cwd() for place in places if place)
