"""Commands that are refused: exit code 2, and the line that helps. Nothing runs, and no process of a backend starts."""

import shutil

import pytest

from attncheck.harness.workers.process import WorkerProcess

NO_MODULE = "it names a Python module, of letters, digits and underscores, a letter first"
REFUSED = {
    "run --in-process refrence": "error: unknown backend 'refrence'; did you mean 'reference'? (known: ...)",
    "run --in-process ./wrong.py": "error: backend './wrong.py': has 5 backends; write ./wrong.py:Wrong or ./wrong.py:Raising or ./wrong.py:Leaving or ./wrong.py:Nowhere or ./wrong.py:Nothing",
    "run small.yaml": "error: backend 'small.yaml' has the name of a case file; give --suite small.yaml",
    "run --in-process wrong:Missing": "error: backend 'wrong:Missing': importing it raised ModuleNotFoundError: No module named 'wrong'; for the file, write ./wrong.py:Missing",
    "run --in-process wrong": "error: backend 'wrong': no backend has this name; for the file, write ./wrong.py",
    "run --in-process ./broken.py:B": "error: backend './broken.py:B': importing it raised ModuleNotFoundError: No module named 'nothing_of_that_name' (TMP/broken.py:N: import nothing_of_that_name); nothing_of_that_name is neither installed nor beside broken.py",
    "run --in-process ./nothing.py:B": "error: backend './nothing.py:B': cannot read nothing.py: No such file or directory",
    "run --in-process ./wrong.py:Nowhere": "error: backend 'Nowhere' is unavailable here: needs a moon",
    "run --in-process reference --suite smoky": "error: unknown suite 'smoky'; did you mean 'smoke'? (known: ...)",
    "run reference --suite nothing.yaml": "error: nothing.yaml: there is no such file; built-in suites: ...",
    "run reference --suite bad.yaml": "error: bad.yaml:4:5: cases[0].bach: a case has no key 'bach'; did you mean 'batch'? (known: ...)",
    "run reference --suite again.yaml,small.yaml": "error: again.yaml and small.yaml are both called 'small'; give them two names",
    "run reference --suite small.yaml --suite 'small.yaml{cache.block_size: 32}'": "error: small.yaml and small.yaml{cache.block_size: 32} are both called 'small'; examine them in two runs",
    "run reference --set layer.num_head=4": "error: small.yaml with --set layer.num_head=4: layer.num_head: a layer has no key 'num_head'; did you mean 'num_heads'? (known: ...)",
    "run reference --set cache.block_size": "error: --set 'cache.block_size': give KEY=VALUE, such as cache.block_size=32",
    "run reference --case decod": "error: no case of small.yaml matches 'decod'; did you mean 'decode'?",
    "run reference --case 'zz*'": "error: no case of small.yaml matches 'zz*'; `attncheck list cases --suite small.yaml` shows the ids",
    "run reference --case prefill --check lse": "error: no case of small.yaml that matches asks for lse",
    "run reference --check numeric": "error: unknown check 'numeric'; did you mean 'numerics'? (known: ...)",
    "run reference --skip 'cuda*' --check cudagraph": "error: --skip cudagraph removes every selected check; leave out --skip, or select more with --check",
    "run reference -k '('": "error: -k '(': expected not OR left parenthesis OR identifier; got end of input; join words by and, or, not and parentheses, such as 'window and not fp8'",
    "run --last-failed": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "run --in-process reference --device tpu": "error: device 'tpu': no such device; give cpu, cuda or cuda:N",
    "run --in-process reference --device meta": "error: device 'meta': attncheck examines on cpu, cuda or cuda:N",
    "run --in-process reference --expect nothing.yaml": "error: nothing.yaml: there is no such file",
    "run --in-process reference --output wrong.py": "error: wrong.py: exists already; runs are never overwritten, name another file",
    "run --in-process reference --dump wrong.py": "error: --dump wrong.py cannot be written: File exists",
    "run reference --no-output --output a.jsonl": "error: --no-output cannot be combined with --output a.jsonl; leave out one of them",
    "run reference --report pdf=a.pdf": "error: unknown report format 'pdf' (known: ...)",
    "run reference --report html": "error: --report html names no file; give html=FILE",
    "run reference --shard 3": "error: --shard 3: give I/N with I from 1 to N, such as 2/7 for the second of seven shards",
    "run reference --case decode --shard 1/2 --in-process": "error: --shard 1/2: 1 cases are selected; give at most as many shards",
    "run --provider vllm --shard 1/2": "error: --shard 1/2 cannot be combined with --provider vllm; leave out one of them",
    "run --provider vllm --skip lse": "error: --skip lse: a run of providers alone has the one check utilities; leave --skip out",
    "run --provider vllm --backend reference --skip utilities": "error: a provider is examined by the check utilities, which --skip leaves out",
    "run reference --jobs 1.5": "error: --jobs '1.5': give a whole number, 1 or above, or auto",
    "run reference --jobs 0": "error: --jobs '0': give a whole number, 1 or above, or auto",
    "run reference --jobs 2 --in-process": "error: --jobs 2 and --in-process exclude each other; leave out one of them",
    "run reference --case-timeout -1": "error: --case-timeout: must be at least 0 (found '-1'); see `attncheck run --help`",
    "run reference --case-timeout nan": "error: --case-timeout: must be at least 0 (found 'nan'); see `attncheck run --help`",
    "run reference --case-timeout 9 --in-process": "error: --case-timeout 9 kills the process of a backend, and --in-process starts none; leave out one of them",
    "run reference --memory-limit much": "error: --memory-limit 'much': give a size, such as 512MiB, 4GiB or a number of bytes",
    "run reference --memory-limit 100MiB": "error: --memory-limit 100 MiB: torch needs more; give 512 MiB or more",
    "run reference --memory-limit 1GiB --in-process": "error: --memory-limit limits the process of a backend, and --in-process starts none; leave out one of them",
    "run reference --device cpu --device-memory-limit 2GiB": "error: --device-memory-limit is for a GPU, and --device cpu has none; leave out one of them",
    "run reference --executor dask": "error: --executor 'dask': give local, ray or ray:FILE",
    "run reference --executor ray --in-process": "error: --executor ray cannot be combined with --in-process; leave out one of them",
    "run reference --executor ray --dump tensors": "error: --executor ray cannot be combined with --dump tensors; leave out one of them",
    "run reference --executor ray --show-output": "error: --executor ray cannot be combined with --show-output; leave out one of them",
    "run reference --executor ray --check timing": "error: --executor ray: the check timing compares times of one device, and a cluster has many; take times by a run on one machine",
    "run --executor ray --provider vllm": "error: --executor ray cannot be combined with --provider vllm; leave out one of them",
    "run reference --resume notes.jsonl --in-process": "error: notes.jsonl:1: is not a run file: its first line is not JSON (expected ident at line 1 column 2)",
    "run reference --resume none.jsonl --in-process": "error: none.jsonl: cannot be read: No such file or directory",
    "run reference --resume run.jsonl.gz --in-process": "error: run.jsonl.gz: cannot be resumed: its name does not end in .jsonl",
    "run reference --resume none.jsonl --output x.jsonl": "error: --resume none.jsonl cannot be combined with --output x.jsonl; leave out one of them",
    "run reference --resume none.jsonl --no-output": "error: --resume none.jsonl cannot be combined with --no-output; leave out one of them",
    "run --resume none.jsonl --provider vllm": "error: --resume none.jsonl cannot be combined with --provider vllm; leave out one of them",
    "run reference --timeout 3": "error: no such option: --timeout; use --case-timeout for one check of a case, --backend-timeout for a whole backend; see `attncheck run --help`",
    "run reference --rounds 3": "error: no such option: --rounds; use `attncheck time --rounds`; see `attncheck run --help`",
    "run reference --ray-address local": "error: no such option: --ray-address; use --executor ray:FILE, whose keys are address, resources and runtime_env; see `attncheck run --help`",
    "run reference --watch": "error: no such option: --watch; use watchfiles of PyPI: `watchfiles --filter python 'attncheck run ./mine.py' .`; see `attncheck run --help`",
    "run reference --frobnicate": "error: no such option: --frobnicate; see `attncheck run --help`",
    "run reference --seed x": "error: --seed: must be a whole number (found 'x'); see `attncheck run --help`",
    "run reference --seed -1": "error: --seed: must be at least 0 (found '-1'); see `attncheck run --help`",
    "time reference --time-limit x": "error: --time-limit: must be a number (found 'x'); see `attncheck time --help`",
    "time reference --time-limit 0": "error: a time limit of 0.0 s: give seconds, more than 0",
    "time reference --time-limit nan": "error: a time limit of nan s: give seconds, more than 0",
    "time reference --rounds 0": "error: --rounds: must be at least 1 (found '0'); see `attncheck time --help`",
    "time reference --rounds 3 --in-process": "error: --rounds 3 in one process: a round is a process; leave out --in-process or --rounds",
    "fuzz reference --check timing": "error: check 'timing' does not run on drawn cases; give one of numerics, lse, cache_write, containment, features, determinism, invariance, builder, cudagraph, refusals",
    "fuzz reference --budget five": "error: --budget 'five': give a time, such as 90s, 5m or 1h",
    "fuzz reference torch_sdpa": "error: fuzz examines one backend, and 2 are given; name one as in `attncheck run`",
    "mutants nowhere-*": "error: no mutant matches 'nowhere-*'; the names are in backends/mutants/*.yaml",
    "mutants --kind weather": "error: no mutant is of kind 'weather'; known are accident, ...",
    "mutants sinks-ignored --shard 2/2": "error: no mutant is left; give fewer filters, or fewer parts",
    "mutants --suite nowhere": "error: unknown suite 'nowhere' (known: ...)",
    "mutants --from nowhere.jsonl": "error: nowhere.jsonl: cannot be read: No such file or directory",
    "shrink": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "report": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "report a.jsonl --format pdf": "error: --format: 'pdf' is not one of 'terminal', 'markdown', 'html', 'junit', 'github', 'pytest-benchmark', 'json', 'csv', 'audit', 'audit-json', 'expect'; see `attncheck report --help`",
    "report nowhere.jsonl --output out": "error: nowhere.jsonl: cannot be read: No such file or directory",
    "compare": "error: missing argument 'BASE'; see `attncheck compare --help`",
    "compare last": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "list cases --case nothing": "error: no case of smoke matches 'nothing'; `attncheck list cases --suite smoke` shows the ids",
    "show no-such-case": "error: no case of the built-in suites matches 'no-such-case'; for a case file, give --suite FILE",
    "site": "error: there is no run file; give RUN or --runs DIR",
    "site --runs none": "error: --runs none is not a folder; name a folder, or give run files as arguments",
    "weigh": "error: no such command 'weigh'; see `attncheck --help`",
    "test ./mine.py": "error: no such command 'test'; use `attncheck run`; see `attncheck --help`",
    "version": "error: no such command 'version'; use `attncheck --version`; see `attncheck --help`",
    "run reference:*": "error: backend 'reference:*': 'reference' is no family of backends; write vllm:*",
    "record --output gone/a.yaml -- true": "error: --output gone/a.yaml: no such folder",
    "record --output small.yaml -- true": "error: --output small.yaml: there already; move it away, or name another file",
    "record --every 0 -- true": "error: recording: every is 0; give a whole number above 0",
    "record -- no-such-command": "error: no-such-command: cannot be run: No such file or directory",
    "new backend class": "error: a backend cannot be called 'class': it is a word of Python's",
    "new backend none": "error: a backend cannot be called 'none': it is a word of Python's",
    "new backend 9a": f"error: a backend cannot be called '9a': {NO_MODULE}",
    "new backend kernels/fast": f"error: a backend cannot be called 'kernels/fast': {NO_MODULE}",
    "new backend ''": f"error: a backend cannot be called '': {NO_MODULE}",
    "new backend torch_sdpa": "error: a backend cannot be called 'torch_sdpa': that is a registered backend; taken are ...",
    "new backend json": "error: a backend cannot be called 'json': json.py would hide an installed module of that name",
    "new backend step --kind classes": "error: a backend cannot be called 'step': its class would be called Step, as another name in the file",
    "new": "Usage: attncheck new [OPTIONS] COMMAND [ARGS]...",
}
"""Commands in the folder of :mod:`conftest`, with their message. A run is of small.yaml, unless it names a suite."""

LONG = {
    "./\udcff.py": "error: './\\udcff.py' is not UTF-8, or not in the locale's encoding; give another name",
    f"reference --output {'o' * 300} --in-process": f"error: '{'o' * 76}...: this name is too long for the file system",
    f"--suite {','.join(['nothing.yaml'] * 30)}": "error: nothing.yaml: there is no such file; built-in suites: ...",
    " ".join(f"./backend_{number}.py" for number in range(257)): (
        "error: 257 backends: a run has at most 256; split them into several runs"
    ),
}
"""Words of runs that are no text, or longer than the system or a run file permits."""


@pytest.mark.parametrize(
    ("command", "message"), [*REFUSED.items(), *((f"run {words}", message) for words, message in LONG.items())]
)
def test_a_refused_command_is_exit_code_2_with_one_line_that_helps(typed, plain, folder, monkeypatch, command, message):
    shutil.copy(folder / "small.yaml", folder / "again.yaml")
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    (folder / "notes.jsonl").write_text("notes of mine")
    (folder / "bad.yaml").write_text("suite: bad\ncases:\n  - id: a\n    bach: q1\n")
    monkeypatch.setattr(WorkerProcess, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(WorkerProcess, "close", lambda *_, **__: None)
    before = files(folder)
    is_run = command.startswith(("run", "time")) and "--suite" not in command
    done = typed(command, *(["--suite", "small.yaml"] if is_run else []))
    assert done.code == 2
    line = plain(" ".join(done.err.splitlines()[0].split()))
    assert line == message or (message.endswith(", ...") and line.startswith(message.removesuffix("...")))
    assert files(folder) == before


def files(folder):
    """The contents of all files but those of Python's and attncheck's caches."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not {"__pycache__", "cache"} & {*path.parts})
    return {path: path.read_bytes() for path in paths}
