"""Starting a run: the run file, the genesis weights and the rendezvous daemon. Never trains."""
