"""The run file: the presets, the manifest that follows from them, and one clear line for every mistake."""

from pathlib import Path

import pytest

from bootstrap.run_file import change_settings, preset_names, read_run_file, write_preset
from model.errors import UserError

RUN = """\
[run]
name = "small"
seed = 1

[model]
vocab_size = 259
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 2
expert_size = 32
num_experts = 4
experts_per_token = 2
max_length = 32

[optimizer]
learning_rate = 1  # a whole number where a float is meant

[data]
block_tokens = 32

[round]
total = 3
local_steps = 2
batch_blocks = 2
train_seconds = 30
margin_seconds = 5
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_run_file_becomes_a_manifest(path: Path) -> None:
    path.write_text(RUN)
    manifest = read_run_file(path).manifest(author="node", fingerprint="ab" * 32, num_blocks=17)
    assert (manifest.name, manifest.seed, manifest.author) == ("small", 1, "node")
    assert (manifest.data.fingerprint, manifest.data.num_blocks) == ("ab" * 32, 17)
    assert manifest.optimizer.learning_rate == 1.0 and isinstance(manifest.optimizer.learning_rate, float)
    assert manifest.loss.load_balancing == 0.01


def test_what_a_run_file_leaves_out_has_a_default(path: Path) -> None:
    path.write_text(RUN)
    plain = read_run_file(path).manifest(author="node", fingerprint="", num_blocks=0)
    assert (plain.encoding.shared, plain.encoding.experts) == ("int8", "int8")
    assert (plain.round.owners_per_expert, plain.round.overlap, plain.round.commit_quorum) == (1, True, 0.0)
    path.write_text(f'{RUN}owners_per_expert = 2\noverlap = false\ncommit_quorum = 0.5\n[encoding]\nexperts = "int4"\n')
    manifest = read_run_file(path).manifest(author="node", fingerprint="", num_blocks=0)
    assert (manifest.encoding.shared, manifest.encoding.experts) == ("int8", "int4")
    assert (manifest.round.owners_per_expert, manifest.round.overlap, manifest.round.commit_quorum) == (2, False, 0.5)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_explain_every_key(path: Path, name: str) -> None:
    write_preset(name, path)
    assert read_run_file(path).run.name == name
    assert all("#" in line for line in path.read_text().splitlines() if "=" in line)


def test_demo_preset_writes_out_every_key(path: Path) -> None:
    write_preset("demo", path)
    run_file = read_run_file(path)
    for section in ("model", "loss", "optimizer", "data", "round", "encoding"):
        settings = getattr(run_file, section)
        left_out = set(type(settings).model_fields) - settings.model_fields_set
        # What is filled in, and what has no value in TOML that says the default.
        assert left_out == {"data": {"fingerprint", "num_blocks"}, "model": {"head_dim"}}.get(section, set())


def test_case_of_a_preset_does_not_matter(path: Path) -> None:
    write_preset("2B", path)
    assert read_run_file(path).run.name == "2b"


def test_presets_refuse_unknown_names_and_existing_files(path: Path) -> None:
    with pytest.raises(UserError, match=r"'dmo'; the presets are 160m, 1b, 2b, 50m, 7b, 9b, demo, tiny-test"):
        write_preset("dmo", path)
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        write_preset("demo", path)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="No such file"):
        write_preset("demo", path.parent / "gone" / "run.toml")


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (
            "learning_rate",
            "learning_rat",
            "optimizer.learning_rat: unknown key, did you mean optimizer.learning_rate? (PATH line 17)",
        ),
        ("[optimizer]", "[optimiser]", "optimiser: unknown key, did you mean optimizer? (PATH line 16)"),
        ("seed = 1\n", "seed = 1\nxyz = 2\n", "run.xyz: unknown key, the keys here are name, seed (PATH line 4)"),
        (
            "[run]",
            "xyz = 2\n[run]",
            "xyz: unknown key, the keys here are run, model, loss, optimizer, data, round, encoding, merge "
            "(PATH line 1)",
        ),
        (
            "[data]",
            "[data]\nlocal_steps = 2",
            "data.local_steps: unknown key, did you mean round.local_steps? (PATH line",
        ),
        ("[run]", "learning_rate = 1\n[run]", "learning_rate: unknown key, did you mean optimizer.learning_rate?"),
        ("[data]", '[data]\nfingerprint = ""', "data.fingerprint: filled in when the run is started, leave it out"),
        ("[data]", "[data]\nnum_blocks = 1", "data.num_blocks: filled in when the run is started, leave it out"),
        ("total = 3\n", "", "round.total: missing, add it (PATH line 22)"),
        ("[data]\nblock_tokens = 32\n", "", "data: missing, add it (PATH)"),
        ("[run]", "[encoding]\nexpert = 1\n[run]", "encoding.expert: unknown key, did you mean encoding.experts?"),
        (
            "[run]",
            '[encoding]\nexperts = "int2"\n[run]',
            "encoding.experts: must be 'fp32', 'bf16', 'int8' or 'int4', not 'int2' (PATH line 2)",
        ),
        (
            "[round]",
            "[round]\ncommit_quorum = 2",
            "round.commit_quorum: must be less than or equal to 1, not 2 (PATH line 23)",
        ),
        (
            "[round]",
            "[round]\nowners_per_expert = 0",
            "round.owners_per_expert: must be greater than 0, not 0 (PATH line 23)",
        ),
        ("[run]", "loss = 1\n[run]", "loss: must be a section with keys of its own (PATH line 1)"),
        ("total = 3", 'total = "3"', "round.total: must be a valid integer, not '3' (PATH line 23)"),
        ("total = 3", "total = true", "round.total: must be a valid integer, not True (PATH line 23)"),
        ("= 1  #", "= -1  #", "optimizer.learning_rate: must be greater than 0, not -1 (PATH line 17)"),
        ('"small"', '"a b"', "run.name: must match pattern"),
        ("seed = 1", "seed = -1", "run.seed: must be greater than or equal to 0, not -1 (PATH line 3)"),
        ("experts_per_token = 2", "experts_per_token = 5", "model: experts_per_token 5 exceeds num_experts 4"),
        ("block_tokens = 32", "block_tokens = 64", "data.block_tokens 64 exceeds model.max_length 32 (PATH)"),
        ("total = 3", "total = ", "PATH is not valid TOML: Invalid value (at line 23, column 9)"),
    ],
)
def test_mistakes_are_named_in_one_line(path: Path, before: str, after: str, complaint: str) -> None:
    assert before in RUN
    path.write_text(RUN.replace(before, after, 1))
    with pytest.raises(UserError) as refusal:
        read_run_file(path)
    assert str(refusal.value).startswith(complaint.replace("PATH", str(path)))
    assert "\n" not in str(refusal.value)


def test_files_that_cannot_be_read(path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_run_file(path)
    path.write_bytes(b'name = "caf\xe9"')
    with pytest.raises(UserError, match="not UTF-8 at byte 11"):
        read_run_file(path)


def test_settings_are_changed_in_place_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_preset("tiny-test", path)
    before = path.read_text().splitlines()
    changes = {"run.name": "mine", "round.total": 7, "round.overlap": False, "encoding.shared": "fp32"}
    change_settings(path, changes)
    run = read_run_file(path)
    assert (run.run.name, run.round.total, run.round.overlap, run.encoding.shared) == ("mine", 7, False, "fp32")
    after = path.read_text().splitlines()
    changed = [line for line in before if line not in after]
    assert [line.split(" = ")[0] for line in changed] == ["name", "total"]
    assert all(any(line.split("#")[1] in other for other in after) for line in changed), "comments stay"


def test_a_setting_that_does_not_exist_is_refused_when_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_preset("tiny-test", path)
    change_settings(path, {"round.totl": 7})
    with pytest.raises(UserError, match="totl"):
        read_run_file(path)
