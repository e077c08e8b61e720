"""The ready application with a plug-in that uses a tokenizer as soon as it is imported."""

from transformers import AutoTokenizer

from busload.app import app
from busload.workers.models import embedding_model_path

AutoTokenizer.from_pretrained(embedding_model_path(), local_files_only=True)([f"text {n}" for n in range(100)])

__all__ = ["app"]
