"""A rehearsal of joining, before anything large is fetched: each check says what it found, and what to do about it."""

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from model.device import choose_device, device_memory
from model.errors import ClockOff, SpesError, UserError
from model.memory_plan import Device
from model.optimizer import has_adam_8bit
from model.settings import ComputeSettings
from model.shards import layout
from node.corpus import check_fingerprint, load_corpus
from node.planning import choose_capacity, fair_share, plan_for, predict_traffic
from node.remote_commits import read_commit
from node.tokens import check_tokenizer, open_encoder
from node.units import duration, size
from swarm.discovery import find_manifest
from swarm.documents import Commit, Signed
from swarm.exchange import CallFailed, Exchange
from swarm.identity import Identity, NodeId
from swarm.manifest import Manifest
from swarm.membership import read_view
from swarm.network import DIAL_REMEDY, UNDIALLED, Network, check_ports, peer_of, probe
from swarm.records import View
from swarm.release import VERSION
from swarm.store import SPARE_BYTES

Verdict = Literal["ok", "warning", "failed", "skipped"]
PROBED_BYTES = 8 << 20
"""So much of the state is fetched to measure the line, and thrown away."""
PROBED_SECONDS = 5.0
SLOW_PART = 0.5
"""Exchanges that take more than this part of a round's training are worth a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    code: str
    """The check; docs/doctor.md has a paragraph for each."""
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What `join` would be started with."""

    peers: Sequence[str]
    run_id: str | None
    home: Path
    listen: Sequence[str]
    announce: Sequence[str]
    data: Sequence[Path]
    tokenizer: Path | None
    device: str
    experts: int | None


async def diagnose(rehearsal: Rehearsal, *, as_json: bool) -> bool:
    """Run all checks and print what they find, each as soon as it is known; returns whether none has failed."""
    findings = []
    async for finding in check_all(rehearsal):
        findings.append(finding)
        if not as_json:
            print(as_line(finding), flush=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return all(finding.verdict != "failed" for finding in findings)


def as_line(finding: Finding) -> str:
    """A finding for people."""
    word = finding.verdict.upper() if finding.verdict == "failed" else finding.verdict
    remedy = f". {finding.remedy}" if finding.remedy else ""
    return f"{word:<8} {finding.code:<9} {finding.text}{remedy}"


async def check_all(rehearsal: Rehearsal) -> AsyncIterator[Finding]:
    """The checks of this box, then those that need the swarm."""
    yield check_packages()
    yield check_device(rehearsal.device)
    yield check_home(rehearsal.home)
    yield check_identity(rehearsal.home / "identity.key")
    yield (port := check_port(rehearsal.listen))
    for address in rehearsal.peers:
        yield await check_peer(address)
    if not rehearsal.peers:
        yield Finding("swarm", "skipped", "nobody to ask; the rest needs --peers ADDR")
        return
    if port.verdict == "failed":
        yield Finding("swarm", "skipped", "without a port nobody is asked")
        return
    identity = Identity.ephemeral()
    try:
        network = await Network.start(
            identity, listen=rehearsal.listen, announce=rehearsal.announce, peers=rehearsal.peers
        )
    except ClockOff as error:
        yield Finding("clock", "failed", str(error))
        return
    except SpesError as error:
        yield Finding("swarm", "failed", str(error))
        return
    try:
        async for finding in _check_swarm(rehearsal, network):
            yield finding
    finally:
        await network.close()


async def _check_swarm(rehearsal: Rehearsal, network: Network) -> AsyncIterator[Finding]:
    yield Finding("clock", "ok", "within 3 s of the clocks of the peers")
    if network.is_dialled:
        yield Finding("dialled", "ok", "the peers can connect to this box")
    else:
        yield Finding("dialled", "warning", UNDIALLED, DIAL_REMEDY.capitalize())
    try:
        manifest = await find_manifest(network, rehearsal.run_id)
    except SpesError as error:
        yield Finding("run", "failed", str(error))
        return
    view = await read_view(network, manifest.digest)
    yield check_run(manifest, view)
    for finding in check_training(rehearsal, manifest.document):
        yield finding
    yield check_text(rehearsal, manifest.document)
    yield await check_line(rehearsal, manifest, view, network)


def check_packages() -> Finding:
    """Whether what is installed is what this release works with."""
    wrong, told = [], []
    for line in requires("spes-node") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found} is not {requirement.specifier}")
        if requirement.name in ("torch", "hivemind", "transformers"):
            told.append(f"{requirement.name} {found}")
    if wrong:
        return Finding("packages", "failed", "; ".join(wrong), "Install spes-node into an environment of its own")
    return Finding("packages", "ok", f"spes-node {VERSION} with {', '.join(told)}")


def check_device(requested: str) -> Finding:
    """What would train."""
    try:
        device, dtype, reason = choose_device(requested)
    except UserError as error:
        return Finding("device", "failed", str(error))
    text = f"{device}, {dtype} ({reason})"
    if device.type == "cpu" and requested != "cpu":
        remedy = "Install a driver and a CUDA build of torch if this box has an NVIDIA GPU; a CPU is slow"
        return Finding("device", "warning", text, remedy)
    return Finding("device", "ok", text)


def check_home(home: Path) -> Finding:
    """Whether the node's folder can be written to."""
    there = _existing(home)
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Finding("home", "failed", f"{there} cannot be written to", "Choose another folder: --home DIR")
    return Finding("home", "ok", f"{home}, {size(shutil.disk_usage(there).free)} free")


def _existing(home: Path) -> Path:
    """The folder, or where it would be made."""
    return next(path for path in (home, *home.absolute().parents) if path.exists())


def check_identity(path: Path) -> Finding:
    """Whether the node's key can be used."""
    if not path.exists():
        return Finding("identity", "ok", "none yet; the first start of the node makes one")
    try:
        identity = Identity.open(path)
    except UserError as error:
        return Finding("identity", "failed", str(error))
    identity.close()
    return Finding("identity", "ok", f"{identity.node_id}")


def check_port(listen: Sequence[str]) -> Finding:
    """Whether the node could listen."""
    try:
        check_ports(listen)
    except UserError as error:
        return Finding("port", "failed", str(error))
    return Finding("port", "ok", f"{', '.join(listen)} is free")


async def check_peer(address: str) -> Finding:
    """Whether a connection to a given address can be opened."""
    try:
        peer_of(address)
    except UserError as error:
        return Finding("peer", "failed", str(error))
    if reason := await probe(address):
        remedy = "Ask for a newer join line, or try later; one address that answers is enough"
        return Finding("peer", "warning", f"{address}: {reason}", remedy)
    return Finding("peer", "ok", f"{address} accepts connections")


def check_run(manifest: Signed[Manifest], view: View) -> Finding:
    """What there is to join."""
    run, present = manifest.document, view.present()
    text = f"{run.name} {manifest.digest[:12]}, {len(view.trainers())} nodes train, {len(present)} are there"
    others = sorted({record.version for record in present.values()} - {VERSION})
    if others:
        return Finding("run", "warning", f"{text}; some have version {', '.join(others)}, this box {VERSION}")
    if not present:
        return Finding("run", "warning", f"{text}", "Nobody is there to fetch the state from; ask who started the run")
    return Finding("run", "ok", text)


def check_training(rehearsal: Rehearsal, run: Manifest) -> Iterator[Finding]:
    """Whether memory and disk are enough for a share of the experts."""
    try:
        device, dtype, _ = choose_device(rehearsal.device)
        memory = device_memory(device)
        plan = plan_for(
            run,
            Device(
                memory=memory,
                gpu=device.type == "cuda",
                compute=ComputeSettings(dtype=dtype),
                adam_8bit=has_adam_8bit(),
            ),
            rehearsal.experts,
        )
    except UserError as error:
        yield Finding("memory", "failed", str(error))
    else:
        capacity, reason = choose_capacity(run, plan, rehearsal.experts)
        text = f"{size(plan.needed)} of {size(memory)}, up to {capacity} of {run.model.num_experts} experts ({reason})"
        yield Finding("memory", "ok", text)
    needed, free = disk_bytes(run), shutil.disk_usage(_existing(rehearsal.home)).free
    text = f"{size(needed)} are needed for the state, {size(free)} are free"
    if free < needed:
        yield Finding("disk", "failed", text, "Free some space, or choose another disk: --home DIR")
    else:
        yield Finding("disk", "ok", text)


def disk_bytes(run: Manifest) -> int:
    """Of a node's folder at its fullest: the kept commits' states, and what travels and is trained in a round."""
    return 4 * 4 * sum(shard.numel for shard in layout(run.model)) + SPARE_BYTES


def check_text(rehearsal: Rehearsal, run: Manifest) -> Finding:
    """Whether the text of the run is here."""
    try:
        encoder = open_encoder(run.data.tokenizer, run.model.vocab_size, rehearsal.tokenizer)
        if run.data.source == "own":
            check_tokenizer(encoder, run.data.fingerprint)
        corpus = load_corpus(run.data, run.seed, rehearsal.data, encoder)
        check_fingerprint(corpus, run.data)
    except SpesError as error:
        return Finding("text", "failed", str(error))
    return Finding("text", "ok", f"{corpus.num_blocks:,} blocks of {corpus.block_tokens} tokens")


async def check_line(rehearsal: Rehearsal, manifest: Signed[Manifest], view: View, network: Network) -> Finding:
    """How fast the state comes, and what a round would take at that rate."""
    exchange = Exchange(network, manifest.digest, handler=None)
    commit = await read_commit(exchange, view)
    for node, record in view.present().items():
        if commit is not None and record.commit == commit.digest and (rate := await _measure(exchange, node, commit)):
            return _judge_line(rehearsal, manifest.document, len(view.trainers()) + 1, rate)
    return Finding("line", "skipped", "nobody has a state to fetch yet")


async def _measure(exchange: Exchange, node: NodeId, commit: Signed[Commit]) -> float:
    """Bytes/s at which a node sends its state; 0 when it sends nothing."""
    moved, began = 0, time.monotonic()
    ranges = [(shard.digest, 0, shard.size) for shard in commit.document.shards.values()]
    with contextlib.suppress(TimeoutError, CallFailed):  # what has come until then tells the rate
        async with asyncio.timeout(PROBED_SECONDS), aclosing(exchange.stream(node, ranges)) as parts:
            async for part in parts:
                moved += len(part.data) if part is not None else 0
                if moved > PROBED_BYTES:
                    break
    return moved / (time.monotonic() - began)


def _judge_line(rehearsal: Rehearsal, run: Manifest, nodes: int, rate: float) -> Finding:
    experts = min(rehearsal.experts or fair_share(run, nodes), run.model.num_experts)
    traffic = predict_traffic(run, experts, max(nodes, 2))
    seconds = max(traffic.sent, traffic.received) / rate
    text = (
        f"{size(rate)}/s from one node; a round moves {size(traffic.sent)} up and {size(traffic.received)} down: "
        f"{duration(seconds)} each way at that rate"
    )
    if seconds > SLOW_PART * run.round.train_seconds:
        return Finding(
            "line", "warning", text, "Close what else uses the line; nobody waits for a slow node, it counts less"
        )
    return Finding("line", "ok", text)
