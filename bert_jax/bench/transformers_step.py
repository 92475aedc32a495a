"""The peer of `bert-jax bench`: `transformers`' BertForMaskedLM with random weights, trained by PyTorch.

Two variants: `stock` projects every position onto the vocabulary, as the library does; `gathered` runs its MLM head on
the masked positions only, as bert_jax does. Both use the library's fast options: SDPA attention, fused AdamW, no
attention mask (all rows are full), and on a GPU bf16 autocast and `torch.compile`.
"""

import numpy as np
import torch
import transformers

from bert_jax.bench import harness, train_step
from bert_jax.config import ModelConfig, OptimizerConfig
from bert_jax.errors import UserError


class TransformersStep:
    """One variant's train step on the shapes of a case, ready to be timed.

    Raises:
      UserError: torch does not support the platform.
    """

    def __init__(self, case: train_step.Case, platform: str, threads: int):
        gpu = platform == "gpu"
        if platform not in ("cpu", "gpu") or (gpu and not torch.cuda.is_available()):
            raise UserError(f"this torch does not support the platform {platform}: install one that does")
        torch.set_num_threads(threads)
        self.device = torch.device("cuda" if gpu else "cpu")
        self.autocast = torch.bfloat16 if case.dtype == "bfloat16" else None
        torch.manual_seed(0)
        self.model = _build(train_step.model_config(case)).to(self.device).train()
        self.optimizer = fused_adamw(self.model, OptimizerConfig(), 1e-5)
        masked = masked_rows(train_step.synthetic_rows(case.batch, case.seq_len), train_step.predictions(case.seq_len))
        self.batch = {name: torch.from_numpy(array.astype(np.int64)).to(self.device) for name, array in masked.items()}
        self.loss_of = self._gathered_loss if case.variant == "gathered" else self._stock_loss
        if gpu:
            self.loss_of = torch.compile(self.loss_of)
            torch.cuda.reset_peak_memory_stats()
        self.time_steps(1)
        self.memory_bytes = torch.cuda.max_memory_allocated() if gpu else None

    def time_steps(self, steps: int) -> float:
        """Seconds of `steps` steps, until the device has finished."""
        with harness.measure_seconds() as timing:
            for _ in range(steps):
                with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                    loss = self.loss_of()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.last = loss.detach()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        return timing["seconds"]

    def loss(self) -> float:
        """Loss of the last step."""
        return float(self.last)

    def _stock_loss(self) -> torch.Tensor:
        return self.model(**{name: self.batch[name] for name in ("input_ids", "token_type_ids", "labels")}).loss

    def _gathered_loss(self) -> torch.Tensor:
        ids, types = self.batch["input_ids"], self.batch["token_type_ids"]
        hidden = self.model.bert(input_ids=ids, token_type_ids=types).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, self.batch["flat_positions"])
        return torch.nn.functional.cross_entropy(self.model.cls(chosen).float(), self.batch["flat_labels"])


def masked_rows(rows: dict[str, np.ndarray], predictions: int) -> dict[str, np.ndarray]:
    """Rows with fixed masks: the peer's collator, which draws masks on the host, is not timed."""
    draw = np.random.default_rng(0)
    batch, seq_len = rows["input_ids"].shape
    shuffled = draw.permuted(np.broadcast_to(np.arange(1, seq_len - 1), (batch, seq_len - 2)), axis=1)
    positions = np.sort(shuffled[:, :predictions], axis=1)
    labels = np.full((batch, seq_len), -100)
    chosen = np.take_along_axis(rows["input_ids"], positions, axis=1)
    np.put_along_axis(labels, positions, chosen, axis=1)
    return {
        "input_ids": np.where(labels >= 0, train_step.MASK, rows["input_ids"]),
        "token_type_ids": rows["token_type_ids"],
        "labels": labels,
        "flat_positions": (positions + seq_len * np.arange(batch)[:, None]).ravel(),
        "flat_labels": chosen.ravel(),
    }


def _build(model: ModelConfig) -> transformers.BertForMaskedLM:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            intermediate_size=model.intermediate_size,
            max_position_embeddings=model.max_positions,
            hidden_dropout_prob=model.hidden_dropout,
            attention_probs_dropout_prob=model.attention_dropout,
            attn_implementation="sdpa",
        )
    )


def fused_adamw(model: torch.nn.Module, config: OptimizerConfig, learning_rate: float) -> torch.optim.AdamW:
    """Fused AdamW with bert_jax's settings; no decay of biases and LayerNorms, as in the library's Trainer."""
    plain, decayed = [], []
    for name, parameter in model.named_parameters():
        (plain if name.endswith("bias") or "LayerNorm" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=config.epsilon, fused=True)
