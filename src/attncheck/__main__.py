"""``python -m attncheck`` and the ``attncheck`` script."""

import signal
import sys


def main() -> int:
    """The command line as a process: its exit code, whatever happens on the way there."""
    try:
        from attncheck.harness.cli.app import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 (the last line of defence)
        # Only what is broken before the command line stands can arrive here, such as a missing dependency.
        sys.stderr.write(f"attncheck itself failed: {type(error).__name__}: {error}\n")
        return 3
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left that catches KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
