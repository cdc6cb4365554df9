"""The network: identity, signed records, leases, rounds, shards. Knows hivemind and bytes, never a torch model."""
