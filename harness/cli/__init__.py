"""The command line. The module of a command is imported when the command is used.

Start at ``app.py``, which lists the commands and turns errors into exit codes. ``options.py`` gives commands the
options that ``harness/run/options.py`` declares, and reads their defaults from pyproject.toml. ``run.py`` executes a
run.
"""
