"""zerofit models: the models that --model knows by name, without the hub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.output.console import echo, terminal_width
from zerofit.cli.parameters import CONTEXT, Verb
from zerofit.cli.shared_options import json_option
from zerofit.core.facts import parameters
from zerofit.core.text_table import table_lines
from zerofit.models.catalog import catalog_models
from zerofit.models.find import probe_model

if TYPE_CHECKING:
    from zerofit.models.source import ModelSource

_HEADER = ("name", "parameters", "longest", "class", "hub id")
_LESS_IMPORTANT = (3, 2, 4)
"""Columns that narrow terminals leave out."""


@click.command(cls=Verb, context_settings=CONTEXT)
@json_option
def models(*, as_json: bool) -> None:
    """List the models that --model knows without the hub.

    --model also takes a folder with a config.json, such a file, and any hub id.
    """
    known = [probe_model(name) for name in catalog_models()]
    if as_json:
        echo(json.dumps([_fields(model) for model in known], indent=2))
    else:
        rows = [_HEADER, *map(_row, known)]
        echo("\n".join(table_lines(rows, width=terminal_width(), leaves_out=_LESS_IMPORTANT)))


def _fields(model: ModelSource) -> dict[str, Any]:
    entry, facts = catalog_models()[model.name], model.facts
    return {
        "name": model.name,
        "hub_ids": list(entry.hub_ids),
        "class": facts.architecture,
        "task": model.task.value,
        "num_parameters": facts.num_parameters,
        "num_layers": facts.num_layers,
        "max_sequence_length": facts.max_sequence_length,
        "checkpoint_dtype": facts.checkpoint_dtype,
        "source": entry.source,
        "note": entry.note,
    }


def _row(model: ModelSource) -> tuple[str, ...]:
    facts = model.facts
    longest = str(facts.max_sequence_length) if facts.max_sequence_length else "-"
    hub_id = catalog_models()[model.name].hub_ids[0]
    return model.name, parameters(facts), longest, facts.architecture, hub_id
