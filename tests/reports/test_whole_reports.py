"""Whole reports of two runs in each text format; `pytest --inline-snapshot=fix -n 0 FILE` writes them again."""

import re

from inline_snapshot import snapshot

from attncheck.reports.formats import FORMATS
from attncheck.reports.terminal.columns import Style


def shown(run, name):
    text, log = FORMATS[name].render_runs([run], Style())
    return text + log


def test_terminal_of_a_run_that_passes(passing_run):
    assert shown(passing_run, "terminal") == snapshot("""\
attncheck 0.1.0, torch 2.13.0+cpu, 2 cores, suite smoke: 2 cases, seed 0

reference: PASSED: 1 case right, 1 not applicable
  could be declared: CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE

backend    numerics  lse  cudagraph  worst    not
                                     error /  examined
                                     allowed
reference  1/1       -    1/1        0.50     4

CUDA-graph levels (recorder: emulated)
  declared NEVER, measured UNIFORM_SINGLE_TOKEN_DECODE: reference

not examined: 4 checks of 2 cases (2 reasons)
in full: --verbose, or attncheck report run.jsonl --section unexamined
as well: --section graph-levels

passed: 1 backend, 2 cases: 1 right, 1 not applicable
""")


def test_markdown_leaves_out_sections_without_content(passing_run):
    headings = re.findall(r"^## (.*)", shown(passing_run, "markdown"), re.MULTILINE)
    assert ", ".join(headings) == snapshot(
        "Backends and suites, Backends and checks, Features, Sizes and forms, CUDA-graph levels, Not examined, Circumstances"
    )


def test_terminal_of_a_run_that_fails(failing_run):
    assert shown(failing_run, "terminal") == snapshot("""\
attncheck 0.1.0, torch 2.13.0+cpu, 2 cores, suites smoke: 2 cases, mine: 1 case, seed 0
note: a note | of the run

reference: PASSED: 3 cases right
Wrong: FAILED: 3 findings in 3 of 7 cases; 1 failed as expected, 3 not applicable
  declared but wrong: lse (1 of 1 case wrong), CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE
    (measured: NEVER)
not examined: third (unavailable; see `attncheck doctor`)

backend    numerics  lse  cache_write  cudagraph  timing  worst    not
                                                          error /  examined
                                                          allowed
reference  3/3       -    -            -          1/1     0.50     -
Wrong      0/2       0/1  0/1          0/1        1/1     18.4     3

finding 1 of 3, Wrong: perhaps: the window is one key too long (the truth with sliding_window=129
  fits all rows)
  2 cases, check numerics; the run exits with code 1 because of it
  example: smoke/window, check numerics: case window
    4 heads, 2 KV heads, head size 64, bfloat16
    7 of 40 rows are wrong, the first is row 3 (request 0, position 35), all heads; the largest
      error is 18.4 times the allowed error, at head 2
    row 3: found 0.5, expected 0.25
    repeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case window --check numerics --device cpu --in-process

finding 2 of 3, Wrong: RuntimeError at wrong.py:9 in forward: no such kernel
  1 case, check cache_write; the run exits with code 1 because of it
  case: smoke/edge, check cache_write: case edge
    4 heads, 2 KV heads, head size 64, bfloat16
    RuntimeError in forward: no such kernel
    File "wrong.py", line 9, in forward
    repeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cache_write --device cpu --in-process

finding 3 of 3, Wrong: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in
  forward
  1 case, check cudagraph; the run exits with code 1 because of it
  case: smoke/edge, check cudagraph: case edge
    4 heads, 2 KV heads, head size 64, bfloat16
    repeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cudagraph --device cpu --in-process

expected: Wrong: 1 case, check lse: upstream issue 5

CUDA-graph levels (recorder: emulated)
  declared UNIFORM_SINGLE_TOKEN_DECODE, measured NEVER: Wrong

Speeds in smoke

Geometric means of 1 case timed for every backend:

backend    cases  forward (us)  build (us)  slowest case
reference  1      1,000         100         edge (1,000)
Wrong      1      2,000         -           edge (2,000)

one round: the next process may well differ by more than the figures show

not examined: 3 checks of 3 cases (1 reason)
in full: --verbose, or attncheck report run.jsonl --section unexamined
as well: --section graph-levels, --section timings, --section expected

error: entry 2 matches no case

failed: 3 backends (1 failed, 1 passed, 1 not examined), 8 cases; 1 error
""")


def test_markdown_of_a_run_that_fails(failing_run):
    assert shown(failing_run, "markdown") == snapshot("""\
# attncheck report

**failed: 3 backends (1 failed, 1 passed, 1 not examined), 8 cases; 1 error**

- **reference: passed**: 3 cases right
- **Wrong: failed**: 3 findings in 3 of 7 cases; 1 failed as expected, 3 not applicable
  - **declared but wrong: lse (1 of 1 case wrong), CUDA-graph level UNIFORM_SINGLE_TOKEN_DECODE (measured: NEVER)**
- not examined: third

## Errors of the run

- entry 2 matches no case

## Findings

### Wrong: perhaps: the window is one key too long (the truth with sliding_window=129 fits all rows)

- 2 cases, check numerics; the run exits with code 1 because of it
- cases: smoke/window, smoke/both
- example: smoke/window, check numerics: case window
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **failed**: 7 of 40 rows are wrong, the first is row 3 (request 0, position 35), all heads; the largest error is 18.4 times the allowed error, at head 2

- row 3: found 0.5, expected 0.25

Perhaps: the window is one key too long (the truth with sliding_window=129 fits all rows)

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case window --check numerics --device cpu --in-process
```

### Wrong: RuntimeError at wrong.py:9 in forward: no such kernel

- 1 case, check cache_write; the run exits with code 1 because of it
- case: smoke/edge, check cache_write: case edge
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

### Wrong: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward

- 1 case, check cudagraph; the run exits with code 1 because of it
- case: smoke/edge, check cudagraph: case edge
  - 4 heads, 2 KV heads, head size 64, bfloat16
  - **failed**: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward

Repeat:

```sh
attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cudagraph --device cpu --in-process
```

## Backends and suites

Good records of examined ones, over all checks; `-` where nothing was examined.

| backend | smoke | mine | worst error / allowed | not examined |
| --- | --- | --- | --- | --- |
| reference 0.1.0<br>lse_base: e | 3/3 | 1/1 | 0.50 | - |
| Wrong<br>lse_base: 2, batch_invariant: yes | **1/6** | - | 18.4 | 3 |
| third<br>lse_base: e | - | - | - | 1 |

## Backends and checks

| backend | numerics | lse | cache_write | cudagraph | timing |
| --- | --- | --- | --- | --- | --- |
| reference | 3/3 | - | - | - | 1/1 |
| Wrong | **0/2** | 0/1 | **0/1** | **0/1** | 1/1 |
| third | - | - | - | - | - |

- Kernels of reference: a (1 case)

- reference declares: no optional feature
- Wrong declares: no optional feature
- third declares: no optional feature

## Features

Measured by the cases that need a feature (numerics, lse, cache_write). A number counts cases.

| feature | reference | Wrong | third |
| --- | --- | --- | --- |
| `lse` | - | wrong in 1 of 1 | - |
| `sliding_window` | right (1) | 2 fail for other reasons | - |

## Sizes and forms

The values that the cases had, each with how many cases were right. A word precedes other values.

|  | reference | Wrong | third |
| --- | --- | --- | --- |
| `head_size` | 64 (1) | - | - |

## CUDA-graph levels

emulated: no GPU, the operators of forward are recorded and replayed on the CPU; probes: passed / run; head-room: the backend may declare this higher level.

| backend | declared | measured | cases | recorder | probes | why no higher | head-room |
| --- | --- | --- | --- | --- | --- | --- | --- |
| Wrong | UNIFORM_SINGLE_TOKEN_DECODE | **NEVER** | 1 | emulated | 0/1 | broke at decode (UNIFORM_SINGLE_TOKEN_DECODE): host read: .item() at wrong.py:9 in forward | - |

### Wrong: declared UNIFORM_SINGLE_TOKEN_DECODE, measured NEVER, 1 case

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode | UNIFORM_SINGLE_TOKEN_DECODE | failed | host read: .item() at wrong.py:9 in forward |
| verify | UNIFORM_BATCH | not run | 'decode' broke |

Cases: smoke/edge

## Speeds

### smoke

Geometric means of 1 case timed for every backend:

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

- Suites: smoke (2 cases), mine (1 case)
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


def test_github_folds_the_findings_of_markdown_and_annotates_them(failing_run):
    findings = shown(failing_run, "markdown").partition("## Findings\n\n")[2].partition("\n\n## ")[0]
    text, log = FORMATS["github"].render_runs([failing_run], Style())
    assert f"<details><summary>Findings (3)</summary>\n\n{findings}\n\n</details>" in text
    assert re.findall(r"^(?:## .*|<details>.*|- error: .*|\| backend .*)", text, re.MULTILINE) == [
        "## attncheck: failed: 3 backends (1 failed, 1 passed, 1 not examined), 8 cases; 1 error",
        "- error: entry 2 matches no case",
        "| backend | numerics | lse | cache_write | cudagraph | timing |",
        "| backend | cases | forward (us) | build (us) | slowest case |",
        "<details><summary>About these figures</summary>",
        "<details><summary>Findings (3)</summary>",
    ]
    assert log == snapshot("""\
::error title=attncheck::entry 2 matches no case
::error file=wrong.py,title=Wrong%3A perhaps%3A the window is one key too long (the truth with sliding_window=129 fits all rows)::2 cases, check numerics%0Asmoke/window: 7 of 40 rows are wrong, the first is row 3 (request 0, position 35), all heads; the largest error is 18.4 times the allowed error, at head 2%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case window --check numerics --device cpu --in-process
::error file=wrong.py,line=9,title=Wrong%3A RuntimeError at wrong.py%3A9 in forward%3A no such kernel::1 case, check cache_write%0Asmoke/edge: RuntimeError in forward: no such kernel%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cache_write --device cpu --in-process
::error file=wrong.py,title=Wrong%3A declared UNIFORM_SINGLE_TOKEN_DECODE%3A host read%3A .item() at wrong.py%3A9 in forward::1 case, check cudagraph%0Asmoke/edge: declared UNIFORM_SINGLE_TOKEN_DECODE: host read: .item() at wrong.py:9 in forward%0Arepeat: attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge --check cudagraph --device cpu --in-process
::warning title=third%3A nothing was examined::needs CUDA
""")
