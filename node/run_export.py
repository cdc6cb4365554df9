"""Exports the state that a daemon has left on this box, beside the daemon if it runs."""

from datetime import UTC, datetime
from pathlib import Path

from model.export import export_checkpoint
from model.settings import Dtype
from model.tokenizer import load_tokenizer
from node.model_card import model_card
from node.stores import find_run
from swarm.documents import Commit
from swarm.held_state import hold_head
from swarm.manifest import Manifest


def export_run(
    home: Path,
    output: Path,
    *,
    run_id: str | None = None,
    tokenizer: Path | None = None,
    dtype: Dtype = "fp32",
) -> tuple[Manifest, Commit]:
    """Write the last complete state of a run, with a model card, into the new folder `output`.

    Args:
        home: folder of the daemon, which may be running and go on meanwhile.
        output: a new folder, or an empty one.
        run_id: beginning of the run's id, when the folder holds several.
        tokenizer: folder of the run's tokenizer; None looks it up by its name.
        dtype: of the exported weights.

    Returns:
        The run and the commit that was exported.

    Raises:
        UserError: there is no such run or no state yet, its tokenizer cannot be had, or the folder is not empty.
    """
    manifest, store = find_run(home, run_id)
    run = manifest.document
    words = load_tokenizer(run.data.tokenizer, tokenizer)
    words.model_max_length = run.model.max_length
    with hold_head(store, manifest.digest) as state:
        card = model_card(manifest, state.commit.document, dtype, datetime.now(UTC).date())
        export_checkpoint(run.model, state.values, output, tokenizer=words, card=card, dtype=dtype)
    return run, state.commit.document
