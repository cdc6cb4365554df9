"""What a run says about its model, losses and optimiser. Imports pydantic only, so reading a run never loads torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["fp32", "bf16"]
"""Of matrix products, and of exported weights."""
StoreKind = Literal["fp32", "bf16", "int8"]
"""How the values of frozen experts are kept."""


class Settings(BaseModel):
    """Base of every settings class: frozen, exact types, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ModelSettings(Settings):
    """Shape of the mixture-of-experts language model; the names of its fields are the field's own."""

    family: Literal["olmoe", "qwen3_moe", "mixtral"] = "olmoe"
    """Architecture in transformers: `olmoe` has QK-norm over the width, `qwen3_moe` over each head, `mixtral` none."""
    vocab_size: int = Field(gt=0, le=1_000_000)
    """Rows of the embedding and of the output head."""
    hidden_size: int = Field(gt=0, le=65_536)
    """Width of the residual stream."""
    num_layers: int = Field(gt=0, le=512)
    """Decoder layers, each with one mixture of experts."""
    num_heads: int = Field(gt=0, le=1024)
    """Attention heads."""
    num_kv_heads: int = Field(gt=0, le=1024)
    """Key and value heads; equal to `num_heads` without grouped-query attention."""
    head_dim: int | None = Field(default=None, gt=0, le=65_536)
    """Width of one attention head; None is `hidden_size / num_heads`, and `olmoe` knows no other."""
    expert_size: int = Field(gt=0, le=262_144)
    """Inner width F of one expert."""
    num_experts: int = Field(gt=0, le=4096)
    """Experts in each layer."""
    experts_per_token: int = Field(gt=0, le=4096)
    """Experts that the router picks for each token (top-k)."""
    norm_topk_prob: bool = False
    """Whether the router weights of the chosen experts are scaled to sum to 1; `mixtral` always does."""
    max_length: int = Field(gt=0, le=1_048_576)
    """Longest sequence in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position embedding."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.hidden_size % self.num_heads and self.head_dim is None:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"the head width {self.head_size} must be even for rotary embeddings")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        if self.family == "olmoe" and self.head_size * self.num_heads != self.hidden_size:
            raise ValueError("family olmoe has heads of hidden_size / num_heads: leave head_dim out")
        if self.family == "mixtral" and not self.norm_topk_prob:
            raise ValueError("family mixtral always scales the router weights to sum to 1: set norm_topk_prob = true")
        return self


class LossSettings(Settings):
    """Weights of the auxiliary losses; defaults of the SPES paper (arXiv 2602.11543, section 3.3 and appendix B)."""

    load_balancing: float = Field(default=0.01, ge=0)
    """Weight of the load-balancing loss, computed per layer and averaged over layers."""
    router_z: float = Field(default=0.001, ge=0)
    """Weight of the router z-loss (mean squared log-partition of the router)."""
    output_z: float = Field(default=1e-5, ge=0)
    """Weight of the output z-loss (mean squared log-partition of the vocabulary)."""
    own_share_start: float = Field(default=1.0, ge=0, le=1)
    """Factor, at the first step, on the share of a node's own experts in its load-balancing loss; below 1 the router is
    drawn to the experts that this node trains. It rises linearly to 1. The released code has 0.7, turned off."""
    own_share_steps: int = Field(default=0, ge=0)
    """Local step at which that factor reaches 1; the released code takes 20 % of all steps. 0 turns it off."""


class OptimizerSettings(Settings):
    """The inner optimiser of the local steps and its schedule."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """`adamw` for training; `sgd` (no momentum) for exact tests against a big batch."""
    learning_rate: float = Field(gt=0, le=100)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Local steps of linear warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Local step at which the cosine reaches its floor; 0 keeps the rate constant after the warm-up."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Floor of the cosine as a fraction of the peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay on every trained parameter, as the paper's configurations have it."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Bound on the norm of the node's own gradient; 0 turns clipping off."""


class ComputeSettings(Settings):
    """How one node computes: what costs memory or time on its own box and changes nothing for the others."""

    dtype: Dtype = "fp32"
    """Of the matrix products; parameters, gradients and moments are fp32 in any case."""
    frozen: StoreKind = "fp32"
    """How experts that others train are kept: 4, 2 or 1 bytes for a weight, int8 with an fp32 scale for each row. With
    bf16 products the bf16 store computes the same bits as the fp32 one."""
    offload: bool = False
    """Keep them in host memory and copy each to the device when its turn comes."""
    recompute: bool = False
    """Compute the inner activations of the experts again in the backward instead of keeping them."""
    checkpoint: bool = False
    """Keep only the input of each layer and compute the layer again in the backward."""
    adam_8bit: bool = False
    """Keep the moments of AdamW in 8 bits, by blocks of 256 (bitsandbytes)."""
    micro_blocks: int = Field(default=0, ge=0)
    """Sequences in one forward and backward; gradients accumulate over a step. 0 takes the whole batch at once."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time on the same device; a switch for the whole process."""
