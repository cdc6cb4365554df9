"""The engine: a mixture of experts of which one box trains a part. Knows torch and transformers, never the network."""
