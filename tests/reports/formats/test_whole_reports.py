"""Whole reports of two runs, as each text format shows them.

`pytest --inline-snapshot=fix -n 0 FILE` writes them again.
"""

from collections.abc import Callable
from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, RunHeader
from attncheck.reports.run_file.records import BUDGET_SHARE, Record, RunFooter
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal.columns import Style

Make = Callable[..., Record]

SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
READ = "host read: .item() at wrong.py:9 in forward"


def levels(declared: str, measured: str, reason: str) -> dict[str, Any]:
    probes = [
        {"name": "decode", "level": SINGLE, "outcome": "passed" if measured == SINGLE else "failed", "reason": reason},
        {"name": "verify", "level": "UNIFORM_BATCH", "outcome": "not run", "reason": "'decode' broke"},
    ]
    if measured == SINGLE:
        probes[0]["reason"], probes[1] = "", probes[1] | {"outcome": "failed", "reason": reason}
    return {"declared": declared, "measured": measured, "recorder": "emulated", "probes": probes}


@pytest.fixture
def green(header: RunHeader, make: Make, graph: Make) -> Run:
    """One backend that passes, with two reasons why checks were not examined."""
    header = header.model_copy(
        update={
            "suites": header.suites[:1],
            "backends": header.backends[:1],
            "checks": ("numerics", "lse", "cudagraph"),
        }
    )
    records = (
        make("passed", figures={BUDGET_SHARE: 0.5}, needs=["sinks", "head_size=64"]),
        graph("passed", levels(SINGLE, SINGLE, "a host read")),
        make("unsupported", check="lse", reasons=["feature 'lse' is not declared"]),
        *(
            make("unsupported", check=check, case_id="wide", reasons=["head_size 80 is not one of 64, 128"])
            for check in header.checks
        ),
    )
    return Run("run.jsonl", header, records, RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}))


@pytest.fixture
def red(header: RunHeader, make: Make, graph: Make, timed: Make) -> Run:
    """Two backends in two suites: findings, an expected one, levels, times, and a backend that cannot run here."""
    third = BackendInfo(name="third", ref="third", conventions={"lse_base": "e"})
    shape = "4 heads, 2 KV heads, head size 64, bfloat16"
    cases = tuple(
        CaseInfo(suite="smoke", id=name, shape=shape, description=f"case {name}", keys={"layer.sliding_window": window})
        for name, window in (("edge", "none"), ("window", 128), ("both", 128))
    )
    header = header.model_copy(
        update={
            "backends": (*header.backends, third),
            "cases": cases,
            "checks": ("numerics", "lse", "cache_write", "cudagraph", "timing"),
            "command": ("attncheck", "run", "reference", "./wrong.py:Wrong"),
            "notes": ("a note | of the run",),
        }
    )
    failure = {
        "backend": "Wrong",
        "figures": {"rows": 40, "bad_rows": 7, BUDGET_SHARE: 18.4},
        "summary": "7 of 40 rows, first: row 3 (request 0, position 35), all heads; worst 18.4 budgets at head 2",
        "meaning": "the window is one key too long (the truth with sliding_window=129 fits all rows)",
        "details": ["row 3: found 0.5, expected 0.25"],
        "needs": ["sliding_window"],
    }
    records = (
        make("passed", figures={BUDGET_SHARE: 0.5}),
        make("passed", case_id="window", figures={BUDGET_SHARE: 0.25}, needs=["sliding_window"], chosen_kernels=["a"]),
        make("passed", suite="mine"),
        graph("passed", levels("NEVER", SINGLE, READ)),
        timed({"forward": 1e6, "build": 1e5}),
        make("failed", case_id="window", **failure),
        make("failed", case_id="both", **failure),
        make("errored", backend="Wrong", check="cache_write", traceback='  File "wrong.py", line 9, in forward\n    x'),
        make("crashed", backend="Wrong", suite="mine", output="Fatal Python error\nlast words"),
        graph("failed", levels(SINGLE, "NEVER", READ), backend="Wrong", summary=f"declared {SINGLE}: {READ}"),
        graph("errored", None, backend="Wrong", case_id="both", message="out of memory"),
        *(make("unsupported", backend="Wrong", check="lse", case_id=f"c{n}", reasons=["no lse"]) for n in range(3)),
        make("xfailed", backend="Wrong", check="lse", case_id="known", reason="upstream issue 5"),
        timed({"forward": 2e6}, backend="Wrong"),
        make("unavailable", backend="third"),
    )
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}, errors=("entry 2 matches no case",))
    return Run("run.jsonl", header, records, footer)


def shown(run: Run, name: str) -> str:
    text, log = FORMATS[name].render_runs([run], Style())
    return text + log


def test_green_terminal(green: Run) -> None:
    assert shown(green, "terminal") == snapshot("""\
attncheck 0.1.0, torch 2.13.0+cpu, 2 cores, suite smoke: 2 cases, seed 0

reference: PASSED: 1 case

backend    numerics  lse  cudagraph  worst      not
                                     error      examined
                                     (budgets)
reference  1/1       -    1/1        0.50       4

CUDA-graph levels (recorder: emulated)

backend    declared                     measured                     cases  probes
reference  UNIFORM_SINGLE_TOKEN_DECODE  UNIFORM_SINGLE_TOKEN_DECODE  1      1/2
  broke at verify (UNIFORM_BATCH): a host read

emulated: no GPU, the operators of forward are recorded and replayed on the CPU; probes: passed of
  examined; head-room: more is measured than declared

not examined: 4 checks of 2 cases (2 reasons)
  list them: --verbose, or attncheck report run.jsonl --section unexamined

passed: 1 backend, 2 cases: 2 passed, 4 unsupported
""")


def test_green_markdown(green: Run) -> None:
    assert shown(green, "markdown") == snapshot("""\
# attncheck report

**passed: 1 backend, 2 cases: 2 passed, 4 unsupported**

- **reference: passed**: 1 case

## Backends and suites

Good records of examined ones, over all checks; `-` where nothing was examined.

| backend | smoke | worst error (budgets) | not examined |
| --- | --- | --- | --- |
| reference 0.1.0<br>lse_base: e | 2/2 | 0.50 | 4 |

## Backends and checks

| backend | numerics | lse | cudagraph |
| --- | --- | --- | --- |
| reference | 1/1 | - | 1/1 |

- reference declares: no optional feature

## Features

Measured by the cases that need a feature (numerics, lse, cache_write). A number counts cases.

| feature | reference |
| --- | --- |
| `sinks` | right (1) |

## Sizes and forms

The values that the cases had, each with how many cases were right. A word precedes other values.

|  | reference |
| --- | --- |
| `head_size` | 64 (1) |

## CUDA-graph levels

emulated: no GPU, the operators of forward are recorded and replayed on the CPU; probes: passed of examined; head-room: more is measured than declared.

| backend | declared | measured | cases | recorder | probes | why no higher | head-room |
| --- | --- | --- | --- | --- | --- | --- | --- |
| reference | UNIFORM_SINGLE_TOKEN_DECODE | UNIFORM_SINGLE_TOKEN_DECODE | 1 | emulated | 1/2 | broke at verify (UNIFORM_BATCH): a host read | - |

### reference: declared UNIFORM_SINGLE_TOKEN_DECODE, measured UNIFORM_SINGLE_TOKEN_DECODE, 1 case

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| verify | UNIFORM_BATCH | failed | a host read |

Cases: smoke/edge

## Not examined

The run has no verdict on these.

| backend | outcome | what | why |
| --- | --- | --- | --- |
| reference | unsupported | 1 case (lse) | feature 'lse' is not declared |
| reference | unsupported | 1 case | head_size 80 is not one of 64, 128 |

## Circumstances

- Asked: smoke (2 cases)
- Checks: numerics, lse, cudagraph
- Seed: 0
- Device: cpu: a cpu
- Machine: a cpu, 2 cores, Linux x86_64
- Versions: attncheck 0.1.0, torch 2.13.0+cpu, numpy 2.3.0, Python 3.11.9
- Policy: TF32 off, deterministic algorithms off
- Started: 2026-01-01T00:00:00+00:00, finished 2026-01-01T00:01:00+00:00
""")


def test_green_github(green: Run) -> None:
    assert shown(green, "github") == snapshot("""\
## attncheck: passed: 1 backend, 2 cases: 2 passed, 4 unsupported

attncheck 0.1.0, torch 2.13.0+cpu, 2 cores, suite smoke: 2 cases, seed 0

- **reference: passed**: 1 case

| backend | numerics | lse | cudagraph |
| --- | --- | --- | --- |
| reference | 1/1 | - | 1/1 |
""")


def test_red_terminal(red: Run) -> None:
    assert shown(red, "terminal") == snapshot("""\
attncheck 0.1.0, torch 2.13.0+cpu, 2 cores, suites smoke: 2 cases, mine: 1 case, seed 0
note: a note | of the run

reference: PASSED: 3 cases
  could be declared: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE
Wrong: FAILED: 5 findings in 4 of 5 cases
  false claims: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE (NEVER is true)
not examined: third (unavailable; see `attncheck doctor`)

backend    numerics  lse  cache_write  cudagraph  timing  worst      not
                                                          error      examined
                                                          (budgets)
reference  3/3       -    -            1/1        1/1     0.50       -
Wrong      0/3       0/1  0/1          0/2        1/1     18.4       3

backend    smoke  mine
reference  4/4    1/1
Wrong      1/7    0/1

finding 1 of 5, Wrong: the window is one key too long (the truth with sliding_window=129 fits all
  rows)
  2 cases, check numerics; exit status 1
  example: smoke/window, check numerics: case window
    4 heads, 2 KV heads, head size 64, bfloat16
    7 of 40 rows, first: row 3 (request 0, position 35), all heads; worst 18.4 budgets at head 2
    row 3: found 0.5, expected 0.25
    likely cause: the window is one key too long (the truth with sliding_window=129 fits all rows)
    repeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case window --check numerics --device cpu --in-process

finding 2 of 5, Wrong: RuntimeError at wrong.py:9 in forward: no such kernel
  1 case, check cache_write; exit status 1
  example: smoke/edge, check cache_write: case edge
    4 heads, 2 KV heads, head size 64, bfloat16
    RuntimeError in forward: no such kernel
    File "wrong.py", line 9, in forward
    repeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cache_write --device cpu --in-process

finding 3 of 5, Wrong: killed by SIGABRT during check numerics
  1 case, check numerics; exit status 1
  example: mine/edge, check numerics
    killed by SIGABRT during check numerics
    printed last:
      Fatal Python error
      last words
    repeat: attncheck run --backend ./wrong.py:Wrong --suite './my suite.yaml' --case edge --check numerics --device cpu --in-process

finding 4 of 5, Wrong: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in
  forward
  1 case, check cudagraph; exit status 1
  example: smoke/edge, check cudagraph: case edge
    4 heads, 2 KV heads, head size 64, bfloat16
    declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward
    repeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cudagraph --device cpu --in-process

finding 5 of 5, Wrong: RuntimeError in forward: out of memory
  1 case, check cudagraph; exit status 1
  example: smoke/both, check cudagraph: case both
    4 heads, 2 KV heads, head size 64, bfloat16
    RuntimeError in forward: out of memory
    repeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case both --check cudagraph --device cpu --in-process

expected: Wrong: 1 case, check lse: upstream issue 5

CUDA-graph levels (recorder: emulated)

backend    declared                     measured                     cases  probes
reference  NEVER                        UNIFORM_SINGLE_TOKEN_DECODE  1      1/2
  broke at verify (UNIFORM_BATCH): host read: .item() at wrong.py:9 in forward
  head-room: could declare UNIFORM_SINGLE_TOKEN_DECODE
Wrong      UNIFORM_SINGLE_TOKEN_DECODE  NEVER                        1      0/1
  broke at decode (UNIFORM_SINGLE_TOKEN_DECODE): host read: .item() at wrong.py:9 in forward
  and 1 case errored

emulated: no GPU, the operators of forward are recorded and replayed on the CPU; probes: passed of
  examined; head-room: more is measured than declared

Speeds in smoke

Geometric means of 1 case that all were timed in:

backend    cases  forward (us)  build (us)  slowest case
reference  1      1,000         100         edge (1,000)
Wrong      1      2,000         -           edge (2,000)

Wrong takes 2 times as long as reference in smoke: 2 times in smoke/edge, 2 times in smoke/edge
one round: the next process may well differ by more than the figures show
forward by CUDA events
build by a monotonic clock around the call
warm: caches were left as the call before left them

not examined: 3 checks of 3 cases (1 reason)
  list them: --verbose, or attncheck report run.jsonl --section unexamined

conventions of Wrong: lse_base: 2, batch_invariant: yes

times of each case: attncheck report run.jsonl --section timings

error: entry 2 matches no case

failed: 3 backends, 8 cases: 6 passed, 3 failed, 2 errored, 1 crashed, 3 unsupported, 1 unavailable,
  1 xfailed, 1 error; false claims of Wrong: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE (NEVER is
  true)
""")


def test_red_markdown(red: Run) -> None:
    assert shown(red, "markdown") == snapshot("""\
# attncheck report

**failed: 3 backends, 8 cases: 6 passed, 3 failed, 2 errored, 1 crashed, 3 unsupported, 1 unavailable, 1 xfailed, 1 error**

- **reference: passed**: 3 cases
  - could be declared: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE
- **Wrong: failed**: 5 findings in 4 of 5 cases
  - **false claims: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE (NEVER is true)**
- not examined: third

## Errors of the run

- entry 2 matches no case

## Findings

### Wrong: the window is one key too long (the truth with sliding_window=129 fits all rows)

- 2 cases, check numerics; exit status 1
- cases: smoke/window, smoke/both
- example: smoke/window, check numerics: case window
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **failed**: 7 of 40 rows, first: row 3 (request 0, position 35), all heads; worst 18.4 budgets at head 2

- row 3: found 0.5, expected 0.25

Likely cause: the window is one key too long (the truth with sliding_window=129 fits all rows)

| figure | value |
| --- | --- |
| rows | 40 |
| bad_rows | 7 |
| budget_share | 18.4 |

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case window --check numerics --device cpu --in-process
```

### Wrong: RuntimeError at wrong.py:9 in forward: no such kernel

- 1 case, check cache_write; exit status 1
- example: smoke/edge, check cache_write: case edge
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **errored**: RuntimeError in forward: no such kernel

```text
  File "wrong.py", line 9, in forward
    x
```

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cache_write --device cpu --in-process
```

### Wrong: killed by SIGABRT during check numerics

- 1 case, check numerics; exit status 1
- example: mine/edge, check numerics
  - **crashed**: killed by SIGABRT during check numerics

The end of what it printed:

```text
Fatal Python error
last words
```

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite './my suite.yaml' --case edge --check numerics --device cpu --in-process
```

### Wrong: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward

- 1 case, check cudagraph; exit status 1
- example: smoke/edge, check cudagraph: case edge
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **failed**: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward

| figure | value |
| --- | --- |
| rows | 40 |
| worst_budget | 18.4 |

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cudagraph --device cpu --in-process
```

### Wrong: RuntimeError in forward: out of memory

- 1 case, check cudagraph; exit status 1
- example: smoke/both, check cudagraph: case both
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **errored**: RuntimeError in forward: out of memory

```text
out of memory
```

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case both --check cudagraph --device cpu --in-process
```

## Backends and suites

Good records of examined ones, over all checks; `-` where nothing was examined.

| backend | smoke | mine | worst error (budgets) | not examined |
| --- | --- | --- | --- | --- |
| reference 0.1.0<br>lse_base: e | 4/4 | 1/1 | 0.50 | - |
| Wrong<br>lse_base: 2, batch_invariant: yes | **1/7** | **0/1** | 18.4 | 3 |
| third<br>lse_base: e | - | - | - | 1 |

## Backends and checks

| backend | numerics | lse | cache_write | cudagraph | timing |
| --- | --- | --- | --- | --- | --- |
| reference | 3/3 | - | - | 1/1 | 1/1 |
| Wrong | **0/3** | 0/1 | **0/1** | **0/2** | 1/1 |
| third | - | - | - | - | - |

- Kernels of reference: a (1 case)

- reference declares: no optional feature
- Wrong declares: no optional feature
- third declares: no optional feature

## Features

Measured by the cases that need a feature (numerics, lse, cache_write). A number counts cases.

| feature | reference | Wrong | third |
| --- | --- | --- | --- |
| `sliding_window` | right (1) | 2 fail for other reasons | - |

## CUDA-graph levels

emulated: no GPU, the operators of forward are recorded and replayed on the CPU; probes: passed of examined; head-room: more is measured than declared.

| backend | declared | measured | cases | recorder | probes | why no higher | head-room |
| --- | --- | --- | --- | --- | --- | --- | --- |
| reference | NEVER | UNIFORM_SINGLE_TOKEN_DECODE | 1 | emulated | 1/2 | broke at verify (UNIFORM_BATCH): host read: .item() at wrong.py:9 in forward | could declare UNIFORM_SINGLE_TOKEN_DECODE |
| Wrong | UNIFORM_SINGLE_TOKEN_DECODE | **NEVER** | 1 | emulated | 0/1 | broke at decode (UNIFORM_SINGLE_TOKEN_DECODE): host read: .item() at wrong.py:9 in forward | - |
| Wrong | - | **errored** | 1 | - | - | - | - |

### reference: declared NEVER, measured UNIFORM_SINGLE_TOKEN_DECODE, 1 case

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| verify | UNIFORM_BATCH | failed | host read: .item() at wrong.py:9 in forward |

Cases: smoke/edge

### Wrong: declared UNIFORM_SINGLE_TOKEN_DECODE, measured NEVER, 1 case

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode | UNIFORM_SINGLE_TOKEN_DECODE | failed | host read: .item() at wrong.py:9 in forward |
| verify | UNIFORM_BATCH | not run | 'decode' broke |

Cases: smoke/edge

## Speeds

### smoke

Geometric means of 1 case that all were timed in:

| backend | cases | forward (us) | build (us) | slowest case |
| --- | --- | --- | --- | --- |
| reference | 1 | 1,000 | 100 | edge (1,000) |
| Wrong | 1 | 2,000 | - | edge (2,000) |

Each case:

| case | part | backend | median (us) | 95% interval | build (us) | rounds |
| --- | --- | --- | --- | --- | --- | --- |
| edge | forward | reference | 1,000 | 980 to 1,020 | 100 | 1 |
| edge | forward | Wrong | 2,000 | 1,960 to 2,040 | - | 1 |

### About these figures

median: geometric mean of the medians of the rounds, each a process of its own; interval: of the median within one process; another process may well lie outside of it; build: the metadata of the batch, made on the host before each forward.

- Wrong takes 2 times as long as reference in smoke: 2 times in smoke/edge, 2 times in smoke/edge
- one round: the next process may well differ by more than the figures show
- forward by CUDA events
- build by a monotonic clock around the call
- warm: caches were left as the call before left them

## Expected findings

### Wrong: upstream issue 5

| check | case | outcome | what happened |
| --- | --- | --- | --- |
| lse | smoke/known | failed | 7 of 40 rows |

## Not examined

The run has no verdict on these.

| backend | outcome | what | why |
| --- | --- | --- | --- |
| Wrong | unsupported | 3 cases (lse) | no lse |
| third | unavailable | 1 case (numerics) | needs CUDA |

## Circumstances

- Asked: smoke (2 cases), mine (1 case)
- Checks: numerics, lse, cache_write, cudagraph, timing
- Seed: 0
- Device: cpu: a cpu
- Machine: a cpu, 2 cores, Linux x86_64
- Versions: attncheck 0.1.0, torch 2.13.0+cpu, numpy 2.3.0, Python 3.11.9
- Policy: TF32 off, deterministic algorithms off
- Started: 2026-01-01T00:00:00+00:00, finished 2026-01-01T00:01:00+00:00
- Command: `attncheck run reference ./wrong.py:Wrong`
- Notes: a note \\| of the run
""")


def test_red_github(red: Run) -> None:
    assert shown(red, "github") == snapshot("""\
## attncheck: failed: 3 backends, 8 cases: 6 passed, 3 failed, 2 errored, 1 crashed, 3 unsupported, 1 unavailable, 1 xfailed, 1 error

attncheck 0.1.0, torch 2.13.0+cpu, 2 cores, suites smoke: 2 cases, mine: 1 case, seed 0

- error: entry 2 matches no case

- **reference: passed**: 3 cases
  - could be declared: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE
- **Wrong: failed**: 5 findings in 4 of 5 cases
  - **false claims: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE (NEVER is true)**
- not examined: third

| backend | numerics | lse | cache_write | cudagraph | timing |
| --- | --- | --- | --- | --- | --- |
| reference | 3/3 | - | - | 1/1 | 1/1 |
| Wrong | **0/3** | 0/1 | **0/1** | **0/2** | 1/1 |
| third | - | - | - | - | - |

### Speeds in smoke

Geometric means of 1 case that all were timed in:

| backend | cases | forward (us) | build (us) | slowest case |
| --- | --- | --- | --- | --- |
| reference | 1 | 1,000 | 100 | edge (1,000) |
| Wrong | 1 | 2,000 | - | edge (2,000) |

<details><summary>About these figures</summary>

- Wrong takes 2 times as long as reference in smoke: 2 times in smoke/edge, 2 times in smoke/edge
- one round: the next process may well differ by more than the figures show
- forward by CUDA events
- build by a monotonic clock around the call
- warm: caches were left as the call before left them

</details>

<details><summary>Findings (5)</summary>

### Wrong: the window is one key too long (the truth with sliding_window=129 fits all rows)

- 2 cases, check numerics; exit status 1
- cases: smoke/window, smoke/both
- example: smoke/window, check numerics: case window
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **failed**: 7 of 40 rows, first: row 3 (request 0, position 35), all heads; worst 18.4 budgets at head 2

- row 3: found 0.5, expected 0.25

Likely cause: the window is one key too long (the truth with sliding_window=129 fits all rows)

| figure | value |
| --- | --- |
| rows | 40 |
| bad_rows | 7 |
| budget_share | 18.4 |

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case window --check numerics --device cpu --in-process
```

### Wrong: RuntimeError at wrong.py:9 in forward: no such kernel

- 1 case, check cache_write; exit status 1
- example: smoke/edge, check cache_write: case edge
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **errored**: RuntimeError in forward: no such kernel

```text
  File "wrong.py", line 9, in forward
    x
```

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cache_write --device cpu --in-process
```

### Wrong: killed by SIGABRT during check numerics

- 1 case, check numerics; exit status 1
- example: mine/edge, check numerics
  - **crashed**: killed by SIGABRT during check numerics

The end of what it printed:

```text
Fatal Python error
last words
```

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite './my suite.yaml' --case edge --check numerics --device cpu --in-process
```

### Wrong: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward

- 1 case, check cudagraph; exit status 1
- example: smoke/edge, check cudagraph: case edge
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **failed**: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward

| figure | value |
| --- | --- |
| rows | 40 |
| worst_budget | 18.4 |

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cudagraph --device cpu --in-process
```

### Wrong: RuntimeError in forward: out of memory

- 1 case, check cudagraph; exit status 1
- example: smoke/both, check cudagraph: case both
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **errored**: RuntimeError in forward: out of memory

```text
out of memory
```

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case both --check cudagraph --device cpu --in-process
```

</details>
::error title=attncheck::entry 2 matches no case
::error file=wrong.py,title=Wrong%3A the window is one key too long (the truth with sliding_window=129 fits all rows)::2 cases, check numerics%0Asmoke/window: 7 of 40 rows, first: row 3 (request 0, position 35), all heads; worst 18.4 budgets at head 2%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case window --check numerics --device cpu --in-process
::error file=wrong.py,line=9,title=Wrong%3A RuntimeError at wrong.py%3A9 in forward%3A no such kernel::1 case, check cache_write%0Asmoke/edge: RuntimeError in forward: no such kernel%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cache_write --device cpu --in-process
::error file=wrong.py,title=Wrong%3A killed by SIGABRT during check numerics::1 case, check numerics%0Amine/edge: killed by SIGABRT during check numerics%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite './my suite.yaml' --case edge --check numerics --device cpu --in-process
::error file=wrong.py,title=Wrong%3A declared UNIFORM_SINGLE_TOKEN_DECODE%3A host read%3A .item() at wrong.py%3A9 in forward::1 case, check cudagraph%0Asmoke/edge: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cudagraph --device cpu --in-process
::error file=wrong.py,title=Wrong%3A RuntimeError in forward%3A out of memory::1 case, check cudagraph%0Asmoke/both: RuntimeError in forward: out of memory%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case both --check cudagraph --device cpu --in-process
::warning title=third%3A nothing was examined::needs CUDA
""")
