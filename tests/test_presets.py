"""The presets: their models to the last parameter, the arithmetic of their runs, and where their values are from."""

import re
from functools import cache
from importlib import resources
from pathlib import Path

import pytest

from bootstrap.run_file import RunFile, preset_names, read_run_file
from model.settings import ModelSettings
from model.shards import layout
from node.units import quantity

DOCUMENT = Path(__file__).parent.parent / "docs" / "presets.md"
PAPER = ("1b", "2b", "7b", "9b")
OURS = ("50m", "160m")
BUDGET = {"1b": 100, "2b": 500, "7b": 500, "9b": 400, "160m": 16, "50m": 5}
"""Tokens of the whole run, billions; the paper's are those of its table A1."""
SOURCE = {
    **dict.fromkeys(PAPER, r"\((?:[^()]*\b)?(?:table|section|appendix|released (?:code|config)|ours)\b[^()]*\)"),
    **dict.fromkeys(OURS, r"\((?:as in 1b|rule|ours)\b[^()]*\)"),
}


def text_of(name: str) -> str:
    return (resources.files("bootstrap") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


@cache
def preset(name: str) -> RunFile:
    with resources.as_file(resources.files("bootstrap") / "presets" / f"{name}.toml") as path:
        return read_run_file(path)


def key_lines(name: str) -> list[str]:
    return [line for line in text_of(name).splitlines() if re.match(r"(# )?[a-z_0-9]+ = ", line)]


def shared_and_expert(model: ModelSettings) -> tuple[int, int]:
    """Parameters of everything but the experts, and of one expert over all layers, counted by hand."""
    width, heads, kv_heads = model.hidden_size, model.num_heads, model.num_kv_heads
    head = width // heads
    attention = 2 * width * heads * head + 2 * width * kv_heads * head
    head_norms = 2 * head if model.family == "qwen3_moe" else heads * head + kv_heads * head
    layer = attention + head_norms + 2 * width + model.num_experts * width  # two norms and the router
    shared = 2 * model.vocab_size * width + width + model.num_layers * layer
    return shared, model.num_layers * 3 * width * model.expert_size


@pytest.mark.parametrize(
    ("name", "own", "total", "trained"),
    [
        ("1b", 4, 1_167.4, 487.9),
        ("2b", 1, 2_127.4, 711.8),
        ("7b", 8, 7_333.3, 2_501.4),
        ("9b", 2, 9_431.0, 3_089.2),
        ("160m", 2, 161.6, 55.5),
        ("50m", 2, 49.8, 16.2),
        ("demo", 2, 3.5, 1.1),
    ],
)
def test_parameters(name: str, own: int, total: float, trained: float) -> None:
    model = preset(name).model
    shared, expert = shared_and_expert(model)
    shards = layout(model)
    assert sum(shard.numel for shard in shards if shard.expert is None) == shared
    assert sum(shard.numel for shard in shards if shard.expert == 0) == expert
    assert sum(shard.numel for shard in shards) == shared + model.num_experts * expert
    assert own * preset(name).round.start_nodes == model.num_experts
    assert round((shared + model.num_experts * expert) / 1e6, 1) == total
    assert round((shared + own * expert) / 1e6, 1) == trained
    header = text_of(name).split("\n\n")[0].replace("\n# ", " ")
    assert name == "demo" or all(f"{millions:,}M" in header for millions in (total, trained))


def test_exact_counts() -> None:
    def total(name: str) -> int:
        return sum(shard.numel for shard in layout(preset(name).model))

    assert {name: total(name) for name in (*PAPER, "demo")} == {
        "1b": 1_167_423_744,
        "2b": 2_127_352_320,
        "7b": 7_333_287_936,
        "9b": 9_430_950_912,
        "demo": 3_480_448,
    }


@pytest.mark.parametrize("name", BUDGET)
def test_schedule_ends_with_the_tokens(name: str) -> None:
    run = preset(name)
    step = run.round.batch_blocks * run.data.block_tokens * run.round.start_nodes
    assert run.optimizer.decay_steps == round(BUDGET[name] * 1e9 / step)
    assert run.round.total == round(BUDGET[name] * 1e9 / (step * run.round.local_steps))
    assert run.data.block_tokens == run.model.max_length


@pytest.mark.parametrize("name", PAPER)
def test_values_that_the_paper_fixes_for_all_models(name: str) -> None:
    run = preset(name)
    assert (run.loss.load_balancing, run.loss.router_z, run.loss.output_z) == (0.01, 0.001, 1e-5)
    optimizer = run.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (optimizer.warmup_steps, optimizer.final_fraction, optimizer.clip_norm) == (2000, 0.1, 1.0)
    node_tokens = run.round.batch_blocks * run.data.block_tokens
    assert node_tokens == (2**21 if name == "7b" else 2**19)


@pytest.mark.parametrize("name", [*PAPER, *OURS])
def test_every_key_says_where_it_is_from(name: str) -> None:
    lines = key_lines(name)
    sourceless = [line for line in lines if not re.search(SOURCE[name], line)]
    assert len(lines) > 35 and not sourceless
    assert all(len(line) <= 120 for line in text_of(name).splitlines())


@pytest.mark.parametrize("name", PAPER)
def test_losses_that_are_commented_out_can_be_turned_on(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(re.sub(r"(?m)^# (own_share)", r"\1", text_of(name)))
    loss = read_run_file(path).loss
    assert loss.own_share_start == 0.7
    assert loss.own_share_steps == round(preset(name).optimizer.decay_steps / 5)


def test_document_has_the_values_of_the_presets() -> None:
    rows = []
    for name in sorted(preset_names(), key=lambda name: sum(shard.numel for shard in layout(preset(name).model))):
        run = preset(name)
        shared, expert = shared_and_expert(run.model)
        experts, nodes = run.model.num_experts, run.round.start_nodes
        tokens = run.round.batch_blocks * run.data.block_tokens
        cells = [
            f"`{name}`",
            f"{(shared + experts * expert) / 1e6:,.2f}M",
            f"{(shared + experts // nodes * expert) / 1e6:,.2f}M",
            f"{experts // nodes} of {experts}",
            str(nodes),
            f"{tokens:,}",
            str(run.round.local_steps),
            f"{run.optimizer.learning_rate:g}",
            quantity(run.round.total * run.round.local_steps * tokens * nodes),
            "arXiv 2602.11543" if name in PAPER else "ours",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    table = "\n".join(rows)
    assert table in DOCUMENT.read_text(encoding="utf-8"), f"the rows are\n{table}"
