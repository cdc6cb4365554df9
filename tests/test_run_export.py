"""A node's state is exported with a model card that tells the facts of its run, while the node goes on."""

import itertools
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from model.checkpoint import Checkpoint
from model.errors import UserError
from model.initial import initial_values
from node.model_card import model_card
from node.run_export import export_run
from swarm.documents import Commit, Share, Signed, seal
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.store import ShardStore, map_values, run_folder, write_durably
from tests import examples


class Home:
    """The folder of a daemon that commits rounds; all weights are the number of the round, over a hundred."""

    def __init__(self, folder: Path, manifest: Manifest, identity: Identity) -> None:
        self.folder = folder
        self._identity = identity
        self.manifest = seal(identity, manifest)
        self.store = ShardStore.open(run_folder(folder, self.manifest), self.manifest.digest)
        write_durably(self.store.folder / "manifest", self.manifest.wire)
        self._shards = [shard for shard, _ in initial_values(manifest.model, 0)]

    def commit(self, number: int) -> Signed[Commit]:
        values = {shard.name: np.full(shard.numel, number / 100, "<f4").tobytes() for shard in self._shards}
        for data in values.values():
            self.store.put(data)
        node = self._identity.node_id
        document = examples.commit(
            run=self.manifest.digest,
            round=number,
            leader=node,
            shards=examples.states(values, version=number),
            shares={node: Share(tokens=512, steps=4)} if number else {},
            tokens=512 * number,
            loss=1.25,
            heldout_loss=1.5,
        )
        signed = seal(self._identity, document)
        self.store.adopt(signed)
        return signed


@pytest.fixture
def home(tmp_path: Path, small_manifest: Manifest, identities: list[Identity]) -> Home:
    return Home(tmp_path / "home", small_manifest, identities[0])


def test_an_export_is_one_commit_while_others_follow(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.commit(0)
    home.commit(1)
    rounds = itertools.count(2)

    def read_while_the_daemon_goes_on(path: Path) -> np.ndarray:
        home.commit(next(rounds))
        return map_values(path)

    monkeypatch.setattr("swarm.held_state.map_values", read_while_the_daemon_goes_on)
    run, commit = export_run(home.folder, tmp_path / "out")
    assert (run.name, commit.round) == ("small", 1)
    assert home.store.head is not None and home.store.head.document.round > 10
    assert not any(home.store.has(shard.digest) for shard in commit.shards.values()), "the daemon has deleted them"
    for _, values in Checkpoint.open(tmp_path / "out").values():
        assert np.array_equal(values, np.full_like(values, 0.01))
    assert "| 1 of 3 |" in (tmp_path / "out" / "README.md").read_text()
    assert not list(home.store.folder.glob("exports/*"))


def test_the_runs_own_tokenizer_is_written(
    small_manifest: Manifest, identities: list[Identity], tmp_path: Path
) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>")), eos_token="<s>"
    )
    tokenizer.save_pretrained(tmp_path / "words")
    data = small_manifest.data.model_copy(update={"tokenizer": "somebody/words"})
    home = Home(tmp_path / "home", small_manifest.model_copy(update={"data": data}), identities[0])
    home.commit(1)
    export_run(home.folder, tmp_path / "out", tokenizer=tmp_path / "words")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (len(exported), exported.eos_token_id, exported.model_max_length) == (3, 0, 32)
    assert AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 0
    with pytest.raises(UserError, match="name a folder that holds a Hugging Face tokenizer"):
        export_run(home.folder, tmp_path / "other", tokenizer=tmp_path / "gone")
    assert not (tmp_path / "other").exists()


def test_the_card_is_one_of_the_hub_and_tells_the_facts(home: Home) -> None:
    commit = home.commit(3)
    text = model_card(home.manifest, commit.document, "bf16", date(2026, 3, 14))
    card = ModelCard(text)
    assert {key: value for key, value in vars(card.data).items() if value is not None} == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["olmoe", "mixture-of-experts", "spes-node"],
    }
    for fact in (
        "# small", home.manifest.digest, commit.document.state, "3 of 3", "1,536", "1.2500 nats", "1.5000 nats",
        "bf16", "2026-03-14", "No licence was chosen", "AutoModelForCausalLM", "random, seed 1", "CPython",
        "| `tokenizer` | bytes |", "| `expert_size` | 16 |", "| `learning_rate` | 0.001 |", "to the last round | 1 |",
    ):  # fmt: skip
        assert fact in text, fact


def test_the_card_of_a_run_that_has_not_trained(home: Home) -> None:
    run = home.manifest.document.model_copy(update={"initial_state": "ef" * 32})
    manifest = Signed(run, home.manifest.signer, home.manifest.digest, home.manifest.wire)
    text = model_card(manifest, home.commit(0).document, "fp32", date(2026, 3, 14))
    assert "not trained yet" in text and f"a checkpoint, as state `{'ef' * 32}`" in text


def test_a_home_without_a_state(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete state yet"):
        export_run(home.folder, tmp_path / "out")
    with pytest.raises(UserError, match="holds no run"):
        export_run(home.folder, tmp_path / "out", run_id="0" * 12)
    assert not (tmp_path / "out").exists()
