"""What checkpoint files call the parameters, and in which shape they hold them: one matrix for each expert."""

from collections.abc import Iterator

from model.architecture import FAMILIES, Family, build_on_meta
from model.settings import ModelSettings

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def stored_name(family: Family, parameter: str) -> str:
    """The stored name of a parameter that is not an expert's."""
    return parameter.replace(".mlp.", f".{family.mixture}.")


def expert_names(family: Family, layer: int, expert: int) -> tuple[str, str, str]:
    """The stored names of an expert's gate [F, D], up [F, D] and down matrix [D, F]."""
    gate, up, down = (
        f"model.layers.{layer}.{family.mixture}.experts.{expert}.{key}.weight" for key in family.expert_keys
    )
    return gate, up, down


def stored_shapes(settings: ModelSettings) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every stored tensor and its shape, in the order of the model."""
    family = FAMILIES[settings.family]
    wide, narrow = (settings.expert_size, settings.hidden_size), (settings.hidden_size, settings.expert_size)
    for name, parameter in build_on_meta(settings).named_parameters():
        if not name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
            yield stored_name(family, name), tuple(parameter.shape)
        elif name.endswith("down_proj"):
            layer = int(name.split(".")[2])
            for expert in range(settings.num_experts):
                yield from zip(expert_names(family, layer, expert), (wide, wide, narrow), strict=True)
