"""One module a command. Each imports at its top only what ``--help`` needs; torch and pydantic load when one runs."""
