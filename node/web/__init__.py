"""The page that shows a swarm, and what it is made from: an HTTP API, events, metrics."""
