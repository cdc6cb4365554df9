"""What several tests of the swarm share: identities, which take a moment to make, and a small manifest."""

from collections.abc import Iterator

import pytest

from model.settings import LossSettings, ModelSettings, OptimizerSettings
from swarm.identity import Identity
from swarm.manifest import DataSettings, Manifest, RoundSettings


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Identity]]:
    """Three identities with key files, held by this process."""
    folder = tmp_path_factory.mktemp("identities")
    opened = [Identity.open(folder / str(number)) for number in range(3)]
    yield opened
    for identity in opened:
        identity.close()


@pytest.fixture(scope="session")
def small_manifest(identities: list[Identity]) -> Manifest:
    """A run of a two-layer model with four experts, by the first identity."""
    return Manifest(
        name="small",
        author=identities[0].node_id,
        seed=1,
        model=ModelSettings(
            vocab_size=259,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            expert_size=16,
            num_experts=4,
            experts_per_token=2,
            max_length=32,
        ),
        loss=LossSettings(),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        data=DataSettings(block_tokens=32),
        round=RoundSettings(total=3, local_steps=4, batch_blocks=2, train_seconds=30.0, margin_seconds=5.0),
    )
