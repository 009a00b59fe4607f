"""``attncheck record``: runs a command that serves with vLLM, and records its batches. Loads neither torch nor vLLM."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.recording.settings import DEFAULT_CASES, RecordingSettings

_PLUGINS = "VLLM_PLUGINS"
PLUGIN = "attncheck_record"
"""Name of attncheck's vLLM plugin."""


def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command that starts vLLM.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The case file to write.")] = Path("recorded.yaml"),
    every: Annotated[int, typer.Option(metavar="N", help="Record at most one in N batches.")] = 1,
    cases: Annotated[int, typer.Option(metavar="N", help="Maximum number of cases in the file.")] = DEFAULT_CASES,
) -> int:
    """Record the batches of a vLLM server as a case file.

    Runs COMMAND with attncheck's vLLM plugin enabled. The file holds each distinct batch with its layers, its cache and
    its frequency, but no tokens and no tensors. It is written every minute and when the engine ends. `attncheck run
    --suite FILE` runs its cases. The exit code is that of COMMAND.
    """
    settings = RecordingSettings(output, every, cases)
    if output.exists():
        raise QuestionError(f"--output {output}: there already; move it away, or name another file")
    if not output.absolute().parent.is_dir():
        raise QuestionError(f"--output {output}: no such folder")
    environment = os.environ | settings.environment()
    if _PLUGINS in environment:  # vLLM loads only the plugins listed there
        environment[_PLUGINS] = ",".join([*filter(None, environment[_PLUGINS].split(",")), PLUGIN])
    code = _run(command, environment)
    if not output.exists():
        reason = f"vLLM ran no batch in {command[0]!r}, or attncheck is not installed in vLLM's environment"
        typer.echo(f"error: {output} was not written: {reason}", err=True)
        return code or 1
    typer.echo(f"written: {output}; examine it: attncheck run --suite {output}", err=True)
    return code


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command to its end, and return its exit code.

    SIGTERM and SIGHUP are forwarded. SIGINT is ignored here: Ctrl-C reaches the command from the terminal.

    Raises:
        QuestionError: the command cannot be started.
    """
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603 (it is what the user typed)
    except OSError as error:
        raise QuestionError(f"{command[0]}: cannot be run: {error.strerror}") from error
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda each, _frame: None if each == signal.SIGINT else process.send_signal(each))
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
