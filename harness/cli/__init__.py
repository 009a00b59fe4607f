"""The command line: one module per command, which imports torch and pydantic only when it runs.

Start at ``app.py``, which registers the commands and turns errors into exit codes. ``run_arguments.py`` and
``process_arguments.py`` declare the options of ``attncheck run``. ``config.py`` reads their defaults from
pyproject.toml, ``run_options.py`` holds them as one value, and ``run_execution.py`` executes the run.
"""
