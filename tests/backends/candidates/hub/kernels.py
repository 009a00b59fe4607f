"""A stand-in for the package ``kernels`` that tests import: its loading functions, for folders on a CPU.

The layout of a folder and the fields are those of version 0.17.2.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

_loaded = []


def get_loaded_kernels():
    return list(_loaded)


def get_local_kernel(repo_path):
    build = Path(repo_path) / "build" / "torch-cpu"
    if not build.is_dir():
        raise FileNotFoundError(f"Cannot find a build variant for this system in {repo_path}:\n\n")
    facts = json.loads((build / "metadata.json").read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location(facts["id"], build / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[facts["id"]] = module
    spec.loader.exec_module(module)
    metadata = SimpleNamespace(version=facts["version"], backend=SimpleNamespace(backend_type="CPU"))
    _loaded.append(SimpleNamespace(module=module, metadata=metadata, repo_info=None))
    return module


def get_kernel(repo_id, *, revision=None, version=None):
    """Load the folder of the working directory that has the name of the repository."""
    module = get_local_kernel(Path(repo_id))
    commit = revision if version is None else f"commit of version {version}"
    _loaded[-1].repo_info = SimpleNamespace(repo_id=repo_id, revision=commit)
    return module
