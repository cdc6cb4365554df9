"""What several tests of the swarm share: identities and peers, which take a moment to make, and a small manifest."""

from collections.abc import Iterator

import pytest

from swarm.identity import Identity
from swarm.manifest import Manifest
from tests import examples
from tests.nodes import Loopback


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
    return examples.manifest(author=identities[0].node_id)


@pytest.fixture(scope="module")
def loopback(identities: list[Identity]) -> Iterator[Loopback]:
    """Three real peers, for all tests of a file."""
    peers = Loopback(identities)
    yield peers
    peers.close()
