"""``python -m attncheck`` and the ``attncheck`` script."""

import signal
import sys


def main() -> int:
    """Run the command line and return the exit code of the process."""
    try:
        from attncheck.harness.cli.app import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 (the last line of defence)
        # The command line handles its own errors. Only an import error, such as a missing dependency, gets here.
        sys.stderr.write(f"attncheck itself failed: {type(error).__name__}: {error}\n")
        return 3
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing catches KeyboardInterrupt from here on


if __name__ == "__main__":
    sys.exit(main())
