"""Shell commands ``python``, ``pytest`` and ``attncheck`` in forked processes; see :mod:`preloaded_python`.

A folder on ``PATH`` has a program of each name. It sends its words, folder, environment and descriptors to the process
of the tests, and exits with the status of the process forked there. If a fresh interpreter is needed, it becomes one.
"""

import json
import os
import shlex
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

if __name__ != "__main__":
    from preloaded_python import MOST_BYTES, Preloaded

_COMMANDS = {"python": (), "attncheck": ("-m", "attncheck"), "pytest": ("-P", "-m", "pytest")}


class ShellCommands:
    """Programs in ``folder``, which must be first on ``PATH``; call :meth:`close` at the end."""

    def __init__(self, folder: Path, preloaded: "Preloaded") -> None:
        self.folder, self._preloaded = folder, preloaded
        address = folder / "socket"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(address))
        self._listening.listen()
        for name, words in _COMMANDS.items():
            line = shlex.join([sys.executable, "-I", "-S", __file__, str(address), *words])
            (folder / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
            (folder / name).chmod(0o700)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # raised when the socket is closed
            while True:
                threading.Thread(target=self._serve, args=(self._listening.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
            process = self._preloaded.fork(given=dict(enumerate(descriptors)), leads=False, **json.loads(message))
            for descriptor in descriptors:
                os.close(descriptor)
            ended = "fresh" if process is None else str(os.waitpid(process, 0)[1])
            connection.send(ended.encode())


def main(address: str, words: list[str]) -> None:
    """Run one of the programs in the folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        program = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(program).encode()], [0, 1, 2])
        ended = connection.recv(64)
    if ended == b"fresh":
        os.execv(sys.executable, [sys.executable, *words])
    code = os.waitstatus_to_exitcode(int(ended))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
