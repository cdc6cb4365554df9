"""What a run says about its model, losses and optimiser. Imports pydantic only, so reading a run never loads torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every settings class: frozen, exact types, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class ModelSettings(Settings):
    """Shape of the mixture-of-experts language model; the names of its fields are the field's own."""

    family: Literal["olmoe"] = "olmoe"
    """Architecture in transformers; `olmoe` is the paper's: QK-norm over the width, router weights as they are."""
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
    expert_size: int = Field(gt=0, le=262_144)
    """Inner width F of one expert."""
    num_experts: int = Field(gt=0, le=4096)
    """Experts in each layer."""
    experts_per_token: int = Field(gt=0, le=4096)
    """Experts that the router picks for each token (top-k)."""
    max_length: int = Field(gt=0, le=1_048_576)
    """Longest sequence in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position embedding."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if (self.hidden_size // self.num_heads) % 2:
            raise ValueError("hidden_size / num_heads must be even for rotary embeddings")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        return self


class LossSettings(Settings):
    """Weights of the auxiliary losses; defaults of the SPES paper (arXiv 2602.11543, section 3.3 and appendix B)."""

    load_balancing: float = Field(default=0.01, ge=0)
    """Weight of the load-balancing loss, computed per layer and averaged over layers."""
    router_z: float = Field(default=0.001, ge=0)
    """Weight of the router z-loss (mean squared log-partition of the router)."""
    output_z: float = Field(default=1e-5, ge=0)
    """Weight of the output z-loss (mean squared log-partition of the vocabulary)."""


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
