"""``attncheck schema``: what a case file may say, for editors and validators."""

import json

import typer


def schema() -> int:
    """Print the JSON schema of case files."""
    from attncheck.cases.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
    return 0
