"""The model card of an exported state: the facts of its run, in the form of the Hugging Face Hub."""

from collections.abc import Iterable
from datetime import date

from model.settings import Dtype, Settings
from swarm.documents import Commit, Signed
from swarm.manifest import DataSettings, Manifest

SOURCES = {
    "builtin": "the documentation text of CPython",
    "files": "one corpus of text files that every node had",
    "own": "text of each node's own",
}
"""What the card says about a source of text; another one is named as the run names it."""


def model_card(manifest: Signed[Manifest], commit: Commit, dtype: Dtype, day: date) -> str:
    """The text of README.md for the state of `commit`, written on `day`."""
    run, model = manifest.document, manifest.document.model
    trained = commit.round > 0
    facts = [
        ("run", run.name),
        ("run id", f"`{manifest.digest}`"),
        ("round", f"{commit.round} of {run.round.total}" if run.round.total else str(commit.round)),
        ("tokens trained", f"{commit.tokens:,}"),
        ("training loss of the last round", _nats(commit.loss) if trained else "none: not trained yet"),
        ("held-out loss at the start of the last round", _nats(commit.heldout_loss)),
        ("nodes that contributed to the last round", str(len(commit.shares))),
        ("state", f"`{commit.state}`"),
        ("first weights", _beginning(run)),
        ("weights", f"{dtype} here; the run itself keeps fp32"),
        ("exported on", day.isoformat()),
    ]
    return "\n".join(
        [
            *("---", "library_name: transformers", "pipeline_tag: text-generation", "tags:"),
            *(f"- {tag}" for tag in (model.family, "mixture-of-experts", "spes-node")),
            "---",
            "",
            f"# {run.name}",
            "",
            f"A mixture-of-experts language model ({model.family}, {model.num_layers} layers, {model.num_experts} "
            f"experts in each, {model.experts_per_token} for each token) that `spes-node` nodes pretrained together.",
            "No licence was chosen: who publishes these weights decides on one.",
            "",
            "## Load it",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            "```",
            "",
            *_table("State", facts),
            *_table("Data", [("source", _source(run.data)), *_settings(run.data, without=("source",))]),
            *_table("Model", _settings(model)),
            *_table("Optimiser of each node", _settings(run.optimizer)),
        ]
    )


def _nats(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f} nats per token"


def _beginning(run: Manifest) -> str:
    if run.initial_state:
        return f"a checkpoint, as state `{run.initial_state}`"
    return f"random, seed {run.seed}"


def _source(data: DataSettings) -> str:
    return SOURCES.get(data.source, data.source)


def _settings(settings: Settings, without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """The keys that are set, as a run file writes them."""
    return [
        (f"`{key}`", f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
        for key, value in settings
        if value not in (None, "") and key not in without
    ]


def _table(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"## {title}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows), ""]
